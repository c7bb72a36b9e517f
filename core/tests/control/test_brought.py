"""Chunks that came up lately, and what is still known of where they came from."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvferry.control.brought import KEPT, Brought, Source
from kvferry.control.deadlines import NEVER
from kvferry.control.outcomes import ChunkFacts

CHUNK = 16


def digest(number: int) -> bytes:
    return number.to_bytes(32, "big")


def chunk(number: int, aliases: tuple[int, ...] = ()) -> ChunkFacts:
    names = tuple((digest(alias), CHUNK // 2) for alias in aliases)
    return ChunkFacts(digest(number), None, 0, CHUNK, names, "", "", NEVER)


numbers = st.integers(0, 20)
notes = st.lists(st.tuples(st.lists(st.tuples(numbers, st.lists(numbers))), st.sampled_from(Source)))


@given(notes)
def test_what_came_last_under_a_name_is_what_is_told(
    told: list[tuple[list[tuple[int, list[int]]], Source]],
) -> None:
    brought, expected = Brought(), dict.fromkeys(range(21), None)
    for chunks, source in told:
        brought.note([chunk(number, tuple(aliases)) for number, aliases in chunks], source)
        for number, aliases in chunks:
            expected.update(dict.fromkeys([number, *aliases], source))
    assert {number: brought.source(digest(number)) for number in expected} == expected


def test_what_came_first_is_forgotten_first_and_the_number_is_bounded() -> None:
    brought = Brought()
    brought.note([chunk(number) for number in range(KEPT)], Source.TIER)
    brought.note([chunk(0), chunk(KEPT)], Source.PEER)
    assert brought.source(digest(0)) is brought.source(digest(KEPT)) is Source.PEER
    assert brought.source(digest(1)) is None
    known = [number for number in range(KEPT + 1) if brought.source(digest(number)) is not None]
    assert len(known) == KEPT
