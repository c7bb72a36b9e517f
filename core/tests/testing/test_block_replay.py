"""What a power cut may leave of a file, against a model that tries every order sector by sector."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.testing.block_replay import SECTOR, BlockLog, PowerCut, Resize, Write


def sectors(*letters: str) -> bytes:
    return b"".join(letter.encode() * SECTOR for letter in letters)


def shown(image: bytes) -> str:
    """A letter for each sector: ``.`` is zero, ``?`` is mixed."""
    parts = [image[at : at + SECTOR] for at in range(0, len(image), SECTOR)]
    names = {bytes(SECTOR): "."}
    return "".join(names.get(part, chr(part[0]) if len(set(part)) == 1 else "?") for part in parts)


def left(cut: PowerCut) -> set[str]:
    return {shown(image) for image in cut.images()}


def last(log: BlockLog) -> PowerCut:
    return log.cut(len(log))


def write(log: BlockLog, *places: tuple[int, bytes]) -> None:
    with log.changing(*(Write(sector * SECTOR, data) for sector, data in places)):
        pass


def flush(log: BlockLog) -> None:
    with log.flushing():
        pass


def test_a_flushed_write_is_left_and_nothing_else_is_possible() -> None:
    log = BlockLog(sectors("a", "b", "c"))
    write(log, (1, sectors("x")))
    flush(log)
    assert last(log).count == 1
    assert left(last(log)) == {"axc"}
    assert last(log).pending == ()


def test_a_write_that_was_not_flushed_is_lost_whole_or_torn_between_any_sectors() -> None:
    log = BlockLog(sectors("a", "b", "c"))
    write(log, (0, sectors("x", "y")))
    assert left(last(log)) == {"abc", "xbc", "ayc", "xyc"}
    assert {shown(image) for image in last(log).whole_images()} == {"abc", "xyc"}


def test_writes_between_two_flushes_come_in_any_order() -> None:
    log = BlockLog(sectors("a"))
    write(log, (0, sectors("x")))
    write(log, (0, sectors("y")))
    assert left(last(log)) == {"a", "x", "y"}
    assert shown(last(log).image_of([1, 0])) == "x"


def test_a_later_write_may_be_there_while_an_earlier_one_is_lost() -> None:
    log = BlockLog(sectors("a", "b"))
    write(log, (0, sectors("x")))
    write(log, (1, sectors("y")))
    assert "ay" in left(last(log))


def test_a_write_behind_a_flush_never_comes_without_what_the_flush_covered() -> None:
    log = BlockLog(sectors("a", "b"))
    write(log, (0, sectors("x")))
    flush(log)
    write(log, (1, sectors("y")))
    assert left(last(log)) == {"xb", "xy"}


def test_a_flush_covers_only_what_had_ended_when_it_began() -> None:
    log = BlockLog(sectors("a", "b"))
    with log.changing(Write(0, sectors("x"))):
        flush(log)
    assert left(last(log)) == {"ab", "xb"}


def test_a_flush_does_not_cover_what_was_written_while_it_went_on() -> None:
    log = BlockLog(sectors("a"))
    with log.flushing():
        write(log, (0, sectors("x")))
    assert left(last(log)) == {"a", "x"}


def test_a_flush_that_has_not_ended_promises_nothing() -> None:
    log = BlockLog(sectors("a"))
    write(log, (0, sectors("x")))
    with log.flushing():
        assert left(last(log)) == {"a", "x"}
    assert left(last(log)) == {"x"}


def test_calls_that_failed_may_have_written_and_have_not_flushed() -> None:
    log = BlockLog(sectors("a", "b"))
    with pytest.raises(OSError), log.changing(Write(0, sectors("x"))):
        raise OSError
    flush(log)
    write(log, (1, sectors("y")))
    with pytest.raises(OSError), log.flushing():
        raise OSError
    assert left(last(log)) == {"ab", "xb", "ay", "xy"}


def test_a_write_under_way_may_come_after_a_durable_one() -> None:
    log = BlockLog(sectors("a"))
    with log.changing(Write(0, sectors("x"))):
        write(log, (0, sectors("y")))
        flush(log)
    assert left(last(log)) == {"x", "y"}


def test_rewriting_the_same_bytes_leaves_nothing_open() -> None:
    log = BlockLog(sectors("a", "b"))
    write(log, (0, sectors("a", "x")))
    assert last(log).choices == (2,)


def test_a_write_that_is_no_whole_sector_keeps_what_is_around_it() -> None:
    log = BlockLog(sectors("a"))
    with log.changing(Write(10, b"xx")):
        pass
    images = set(last(log).images())
    assert images == {sectors("a"), b"a" * 10 + b"xx" + b"a" * (SECTOR - 12)}


def test_two_writes_into_one_sector_are_both_there_or_either() -> None:
    log = BlockLog(sectors("a"))
    for write_ in (Write(0, b"x"), Write(5, b"y")):
        with log.changing(write_):
            pass
    rest = b"a" * (SECTOR - 6)
    assert set(last(log).images()) == {
        first + b"aaaa" + second + rest for first in (b"a", b"x") for second in (b"a", b"y")
    }


def test_a_file_grows_or_does_not_until_that_is_flushed() -> None:
    log = BlockLog(sectors("a"))
    with log.changing(Resize(3 * SECTOR)):
        pass
    write(log, (1, sectors("x")))
    assert left(last(log)) == {"a", "a..", "ax."}
    flush(log)
    assert left(last(log)) == {"ax."}


def test_what_is_written_far_behind_the_end_lies_there() -> None:
    log = BlockLog(sectors("a"))
    write(log, (3, sectors("x")))
    flush(log)
    assert left(last(log)) == {"a..x"}
    assert shown(last(log).image_of([])) == "a..x"


def test_a_write_behind_the_end_makes_the_file_longer() -> None:
    log = BlockLog(sectors("a"))
    write(log, (1, sectors("x")))
    assert left(last(log)) == {"a", "ax", "a."}
    assert {shown(image) for image in last(log).whole_images()} == {"a", "ax"}


def test_what_was_cut_off_may_come_back_until_that_is_flushed() -> None:
    log = BlockLog(sectors("a", "b"))
    for length in (SECTOR, 2 * SECTOR):
        with log.changing(Resize(length)):
            pass
    assert left(last(log)) == {"a", "ab", "a."}
    flush(log)
    assert left(last(log)) == {"a."}


def test_marks_tell_what_was_promised_before_the_cut() -> None:
    log = BlockLog()
    log.mark("first")
    write(log, (0, sectors("x")))
    log.mark("second")
    assert [cut.marks for cut in log.cuts()] == [(), *[("first",)] * 3, ("first", "second")]


STEPS = st.lists(
    st.one_of(
        st.none(),
        st.tuples(st.integers(0, 2), st.integers(1, 2), st.sampled_from("xyz")),
    ),
    max_size=6,
)


@given(STEPS)
def test_every_order_of_sectors_is_left_and_no_other_content(
    steps: list[tuple[int, int, str] | None],
) -> None:
    """The model plays all orders of all sectors that were written since the last flush, one by one."""
    start = sectors("a", "b", "c", "d")
    log = BlockLog(start)
    durable, since = start, list[tuple[int, bytes]]()
    for step in steps:
        if step is None:
            flush(log)
            for sector, data in since:
                durable = put(durable, sector, data)
            since = []
        else:
            first, count, letter = step
            write(log, (first, sectors(*letter * count)))
            since += [(first + number, sectors(letter)) for number in range(count)]
    assert left(last(log)) == {shown(image) for image in orders(durable, since)}
    assert last(log).count == len(left(last(log)))


def orders(durable: bytes, since: Sequence[tuple[int, bytes]]) -> set[bytes]:
    by_sector: dict[int, list[bytes]] = {}
    for sector, data in since:
        by_sector.setdefault(sector, []).append(data)
    found = set()
    for last_ones in itertools.product(*([None, *writes] for writes in by_sector.values())):
        image = durable
        for sector, data in zip(by_sector, last_ones, strict=True):
            image = image if data is None else put(image, sector, data)
        found.add(image)
    return found


def put(image: bytes, sector: int, data: bytes) -> bytes:
    return image[: sector * SECTOR] + data + image[(sector + 1) * SECTOR :]


@given(STEPS, st.integers(0, 1 << 32))
def test_drawn_images_and_whole_ones_are_among_all(
    steps: list[tuple[int, int, str] | None], seed: int
) -> None:
    log = BlockLog(sectors("a", "b", "c", "d"))
    for step in steps:
        if step is None:
            flush(log)
        else:
            write(log, (step[0], sectors(*step[2] * step[1])))
    chance = random.Random(seed)
    for cut in log.cuts():
        everything = set(cut.images())
        assert cut.image(chance.randrange) in everything
        assert set(cut.whole_images()) <= everything
        assert cut.image(lambda _: 0) == cut.image_of([])
        order = list(range(len(cut.pending)))
        chance.shuffle(order)
        assert cut.image_of(order) in everything
