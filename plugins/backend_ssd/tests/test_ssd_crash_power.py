"""A power cut at any moment: what was acknowledged is there, and nothing is wrong whatever the disk did.

All changes of the store file are recorded where they leave the backend. A cut leaves everything that a
flush covered, and of the rest any part, in any order, torn between sectors. Each such image is opened
with the real backend.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from attrs import evolve
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvferry.testing.block_replay import PowerCut
from kvferry_backend_ssd.block_io import BlockIO, ForwardingIO, Piece, Purpose
from kvferry_backend_ssd.entry import Rows
from kvferry_backend_ssd.intake import Intake
from kvferry_backend_ssd.options import IOPath
from kvferry_backend_ssd.recovery import _Scan
from plugins.backend_ssd.tests.ssd_crash import SLOT_BYTES, Promises, Rig, Wrap, check, content
from plugins.backend_ssd.tests.ssd_raw import SUPERBLOCK
from plugins.backend_ssd.tests.ssd_recording import Images, Recording, Step, judge, promises

LONG = os.environ.get("KVFERRY_TEST_LONG") == "1"
"""Try more: all images of moments with up to 4,096 of them, and hundreds of drawn workloads."""
FEW = 4096 if LONG else 32
DRAWN = 40 if LONG else 3
EXAMPLES = 500 if LONG else 15

REUSE: Sequence[Step] = (
    ("store", [0]),
    ("delete", [0]),
    ("store", [1, 2]),
    ("delete", [1]),
    ("store", [3]),
    ("delete", [2, 3]),
    ("begin store", [4]),
    ("begin store", [5]),
    ("begin delete", [4]),
    ("begin store", [6]),
    ("wait", []),
)
"""Over two slots: every slot is used again and again, in groups of one and of several."""


def images_of(cut: PowerCut) -> Iterator[bytes]:
    """All that may be left where that is little; elsewhere all without torn writes, and some drawn ones."""
    if cut.count <= FEW:
        yield from cut.images()
        return
    if len(cut.pending) <= 6:
        yield from cut.whole_images()
    chance = random.Random(cut.count)
    for _ in range(DRAWN):
        yield cut.image(chance.randrange)


@pytest.fixture
def rig(quick_folder: Path, io_path: IOPath) -> Rig:
    return Rig(path=quick_folder / "store", io=io_path, slots=2)


def test_every_moment_of_a_small_store_is_survived(rig: Rig) -> None:
    recording = Recording(rig)
    recording.session(REUSE)
    assert judge(recording, images_of) > 100


def test_every_moment_of_a_restart_and_of_a_close_is_survived(rig: Rig) -> None:
    """Uses are written when it is closed, and a restart writes the first page again."""
    recording = Recording(rig)
    recording.session([("store", [0, 1]), ("read", [0])])
    recording.session([("delete", [0]), ("read", [1])])
    recording.session([("store", [2])])
    judge(recording, images_of)


def test_every_moment_of_mending_a_damaged_store_is_survived(rig: Rig) -> None:
    """Both copies of the first page and an entry are lost: everything is found again in the slots. Then
    the power fails while that is put right."""
    recording = Recording(rig)
    recording.session([("store", [0, 1])])
    image = bytearray(rig.store.read_bytes())
    image[:SUPERBLOCK] = bytes(SUPERBLOCK)
    image[SUPERBLOCK + 100] ^= 1
    rig.store.write_bytes(image)
    mending = Recording(rig, image=bytes(image))
    mending.numbers |= recording.numbers
    mending.session([("delete", [1]), ("store", [2])])
    judge(mending, images_of, Promises(stored={0, 1}))


def test_every_moment_of_growing_a_file_that_was_cut_off_is_survived(
    quick_folder: Path, io_path: IOPath
) -> None:
    """The slots of two chunks are gone, their entries are not, and new slots come where the old ones were."""
    rig = Rig(path=quick_folder / "store", io=io_path, slots=4)
    recording = Recording(rig)
    recording.session([("store", [0, 1, 2])])
    image = rig.store.read_bytes()[: -3 * SLOT_BYTES]
    rig.store.write_bytes(image)
    growing = Recording(rig, image=image)
    growing.numbers |= recording.numbers
    growing.session([("store", [3])])
    judge(growing, images_of, Promises(stored={0}, deleted={1, 2}))


def test_every_opening_makes_the_names_of_file_and_folders_durable(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where all of them are there: whoever made them may have been killed before they were."""
    rig.open().close()
    synced = set()
    real = os.fsync

    def fsync(descriptor: int) -> None:
        synced.add(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    rig.open().close()
    assert synced >= {rig.store.parent, rig.path, rig.path.parent}


# -- drawn workloads -------------------------------------------------------------------------------

WORKLOADS = st.lists(
    st.tuples(
        st.sampled_from(["store", "delete", "begin store", "begin delete"]),
        st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True),
    ),
    min_size=1,
    max_size=8,
)
CUTS = st.tuples(st.floats(0, 1), st.sampled_from([0.1, 0.5, 0.9]), st.integers(0, 1 << 32))
"""When, how likely each sector is to be as it was, and what of the rest is chosen."""


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1, 5), WORKLOADS, WORKLOADS, st.lists(CUTS, min_size=2, max_size=6))
def test_any_workload_survives_two_power_cuts_in_a_row(
    rig: Rig,
    slots: int,
    first: Sequence[Step],
    second: Sequence[Step],
    cuts: Sequence[tuple[float, float, int]],
) -> None:
    shutil.rmtree(rig.path.parent)
    rig.path.parent.mkdir()
    rig = evolve(rig, slots=slots)
    recording = Recording(rig)
    recording.session([*first, ("wait", [])], check=False)
    images = Images.beside(rig)
    for when in cuts[1:]:
        image, due = _cut(recording, when)
        images.put(recording, image)
        listed = check(images.rig, due, recording.numbers)
    images.put(recording, image)  # the second life begins with the last of them
    again = Recording(images.rig, image=image)
    again.numbers |= recording.numbers
    again.session([*second, ("wait", [])], check=False)
    image, due = _cut(again, cuts[0], Promises(stored=listed, deleted=recording.numbers - listed))
    images.put(again, image)
    check(images.rig, due, again.numbers)


def _cut(
    recording: Recording, cut: tuple[float, float, int], before: Promises | None = None
) -> tuple[bytes, Promises]:
    when, lost, seed = cut
    chance = random.Random(seed)
    found = recording.log.cut(round(when * len(recording.log)))
    image = found.image(lambda number: 0 if chance.random() < lost else chance.randrange(number))
    return image, promises(found, before)


# -- mistakes that must be found ---------------------------------------------------------------------


class FlushesLost(ForwardingIO):
    """Says that it flushed and does not, when ``lost`` holds for what all lanes wrote since the last flush:
    whether all of it removes entries."""

    def __init__(self, inner: BlockIO, since: list[bool], lost: Callable[[bool], bool]) -> None:
        super().__init__(inner)
        self._since = since
        self._lost = lost

    def write(self, fd: int, pieces: Sequence[Piece]) -> list[int]:
        self._since += [
            piece.purpose is Purpose.TABLE and not any(content(piece.address, piece.length))
            for piece in pieces
        ]
        return super().write(fd, pieces)

    def flush(self, fd: int) -> None:
        only_removals = all(self._since)
        self._since.clear()
        if not self._lost(only_removals):
            super().flush(fd)


def _losing(lost: Callable[[bool], bool]) -> Wrap:
    since: list[bool] = []
    return lambda io: FlushesLost(io, since, lost)


MISTAKES: dict[str, Callable[[], Wrap]] = {
    "no flush at all": lambda: _losing(lambda only_removals: True),
    "no flush behind writes": lambda: _losing(lambda only_removals: not only_removals),
    "no flush behind removals, so that slots are used again too early": lambda: _losing(
        lambda only_removals: only_removals
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_in_the_order_is_found(quick_folder: Path, mistake: Callable[[], Wrap]) -> None:
    """The same search, with a backend that makes the mistake: it must not pass."""
    recording = Recording(Rig(path=quick_folder / "store", io=IOPath.THREADS, slots=2), mistake())
    recording.session(REUSE)
    with pytest.raises(AssertionError):
        judge(recording, images_of)


def _trust_all(scan: _Scan, rows: Rows) -> list[int]:
    return []


def _all_settled(intake: Intake) -> int:
    return 1 << 40


OVERSIGHTS = {
    "a restart looks at no values": (_Scan, "without_value", _trust_all),
    "an entry vouches for others that are not durable": (Intake, "settled", _all_settled),
}


@pytest.mark.parametrize(("where", "name", "instead"), OVERSIGHTS.values(), ids=OVERSIGHTS)
def test_an_oversight_about_what_is_durable_is_found(
    quick_folder: Path, monkeypatch: pytest.MonkeyPatch, where: type, name: str, instead: object
) -> None:
    monkeypatch.setattr(where, name, instead)
    recording = Recording(Rig(path=quick_folder / "store", io=IOPath.THREADS, slots=2))
    recording.session(REUSE)
    with pytest.raises(AssertionError):
        judge(recording, images_of)
