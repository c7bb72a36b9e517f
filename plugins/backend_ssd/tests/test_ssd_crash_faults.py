"""A disk that fails, fills up, or goes away: clear failures, other chunks served, and a way back."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from attrs import define, evolve, field

from kvferry.api import DeleteStatus, ErrorKind, ItemResult, KVFerryError, ReadStatus, WriteStatus
from kvferry.testing.conformance.driver import told
from kvferry_backend_ssd.block_io import BlockIO, Piece, Purpose
from kvferry_backend_ssd.options import IOPath
from plugins.backend_ssd.tests.ssd_bench import FaultyIO
from plugins.backend_ssd.tests.ssd_children import child
from plugins.backend_ssd.tests.ssd_crash import Promises, Rig, check, chunk, chunks, key, statuses
from plugins.backend_ssd.tests.ssd_mounts import (
    MIB,
    NotPermitted,
    command,
    mount_ext4,
    mount_memory,
    with_mounts,
)
from plugins.backend_ssd.tests.ssd_recording import Step, carry_out

SLOTS = 4
NUMBERS = range(8)
KEPT = (0, 1, 2)
STEPS: Sequence[Step] = (
    ("store", [3]),
    ("delete", [0]),
    ("begin store", [4]),
    ("begin delete", [3]),
    ("begin store", [5, 6]),
    ("wait", []),
)


@define
class Trouble:
    """Calls of one kind that fail while it is ``on``."""

    call: str
    purpose: Purpose | None
    number: int
    on: bool = False
    met: int = 0
    _lock: threading.Lock = field(factory=threading.Lock)

    def meet(self, call: str, purpose: Purpose | None) -> int:
        if not self.on or (call, purpose) != (self.call, self.purpose):
            return 0
        with self._lock:
            self.met += 1
        return self.number

    def wrap(self, io: BlockIO) -> BlockIO:
        return _Troubled(io, self.meet)


class _Troubled(FaultyIO):
    """Knows one call more, and tells the flush behind entries from the one behind values."""

    _last: Purpose | None = None

    def write(self, fd: int, pieces: Sequence[Piece]) -> list[int]:
        self._last = pieces[-1].purpose if pieces else self._last
        return super().write(fd, pieces)

    def flush(self, fd: int) -> None:
        number = self._meet("flush behind", self._last)
        if number:
            raise OSError(number, os.strerror(number))
        super().flush(fd)

    def truncate(self, fd: int, length: int) -> None:
        number = self._meet("truncate", None)
        if number:
            raise OSError(number, os.strerror(number))
        super().truncate(fd, length)


def clear(result: ItemResult, *names: str) -> None:
    """A failure says what the system said, where, and what to do."""
    error = result.error
    assert error is not None
    assert error.kind is ErrorKind.IO, told(result)
    assert any(name in error.why for name in names), told(result)
    assert error.where
    assert error.remedy


KINDS = [
    *(("write", purpose) for purpose in (Purpose.VALUE, Purpose.HEAD, Purpose.TABLE, Purpose.USES)),
    ("read", Purpose.VALUE),
    ("read", Purpose.TABLE),
    ("flush", None),
    ("flush behind", Purpose.TABLE),
    ("allocate", None),
]


@pytest.fixture
def rig(quick_folder: Path, io_path: IOPath) -> Rig:
    """A store with three chunks."""
    rig = Rig(path=quick_folder / "store", io=io_path, slots=SLOTS)
    driver = rig.open()
    driver.store(chunks(KEPT))
    driver.close()
    return rig


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.EROFS, errno.ENOSPC])
@pytest.mark.parametrize(("call", "purpose"), KINDS, ids=lambda each: getattr(each, "value", each))
def test_calls_that_fail_for_a_while_cost_what_they_are_about_and_nothing_else(
    rig: Rig, call: str, purpose: Purpose | None, number: int
) -> None:
    trouble = Trouble(call, purpose, number)
    promises = Promises(stored=set(KEPT))
    results: list[ItemResult] = []

    def tell(about: int, status: WriteStatus | DeleteStatus | None) -> None:
        if status is None:
            promises.begin(about)
        else:
            promises.hear(about, status)

    driver = rig.over(trouble.wrap).open()
    trouble.on = True
    carry_out(driver, STEPS, tell, check=False)
    for ticket in driver.tickets:
        results += ticket.results
    for result in results:
        if result.error is not None:
            clear(result, errno.errorcode[number])
    found = statuses(driver, NUMBERS)
    assert ReadStatus.CORRUPT not in found
    if (call, purpose) != ("read", Purpose.VALUE):
        assert {number for number in NUMBERS if found[number] is ReadStatus.FOUND} >= promises.stored
    trouble.on = False
    assert statuses(driver, promises.stored) == [ReadStatus.FOUND] * len(promises.stored)
    driver.close()
    assert trouble.met or (call, purpose) in [
        ("allocate", None),
        ("write", Purpose.USES),
        ("read", Purpose.TABLE),
    ]
    check(rig, promises, NUMBERS)


@pytest.mark.parametrize(("call", "purpose"), KINDS, ids=lambda each: getattr(each, "value", each))
def test_no_slot_is_lost_however_often_calls_fail(rig: Rig, call: str, purpose: Purpose | None) -> None:
    trouble = Trouble(call, purpose, errno.EIO)
    driver = rig.over(trouble.wrap).open()
    for trouble.on in (True, True, False, True, False):
        carry_out(driver, STEPS, lambda _number, _status: None, check=False)
    # Slots that the disk would not give up come back with the first group that it takes.
    driver.delete([key(number) for number in NUMBERS])
    driver.write([chunk(10)])
    driver.delete([key(10)])
    driver.store(chunks(range(20, 20 + SLOTS)))
    driver.close()
    check(rig, Promises(stored=set(range(20, 20 + SLOTS)), deleted=set(NUMBERS)), [*NUMBERS, *range(20, 24)])


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.EROFS, errno.ENOSPC])
@pytest.mark.parametrize(
    ("call", "purpose"),
    [
        ("read", Purpose.SUPERBLOCK),
        ("write", Purpose.SUPERBLOCK),
        ("flush", None),
        ("read", Purpose.TABLE),
        ("truncate", None),
    ],
    ids=lambda each: getattr(each, "value", each),
)
def test_an_opening_that_fails_says_why_leaves_nothing_and_works_once_the_cause_is_gone(
    rig: Rig, call: str, purpose: Purpose | None, number: int
) -> None:
    with open(rig.store, "ab") as file:
        file.write(b"\x00" * 100)  # so that there is something to truncate
    trouble = Trouble(call, purpose, number, on=True)
    with pytest.raises(KVFerryError) as caught:
        rig.over(trouble.wrap).open()
    assert errno.errorcode[number] in caught.value.why
    assert caught.value.kind is ErrorKind.IO
    assert caught.value.remedy
    assert trouble.met
    check(rig, Promises(stored=set(KEPT)), NUMBERS)


def test_a_folder_that_is_removed_under_an_open_store_fails_everything_until_the_next_opening(
    rig: Rig,
) -> None:
    driver = rig.open()
    shutil.rmtree(rig.path)
    for result in driver.write(chunks([5])):
        clear(result, "ENOENT")
    for number in KEPT:
        clear(driver.read_one(key(number), chunk(number)[0].size).result, "ENOENT")
    ticket = driver.submit_delete([key(0)])
    driver.finish(ticket)
    clear(ticket.results[0], "ENOENT")
    driver.close()
    assert check(rig, Promises(deleted=set(KEPT)), NUMBERS) == set()


def test_a_store_whose_place_is_taken_by_another_file_is_left_alone(rig: Rig) -> None:
    driver = rig.open()
    store = rig.store
    store.rename(store.with_name("moved"))
    store.write_bytes(b"somebody else's")
    for result in driver.write(chunks([5])):
        clear(result, "ENOENT")
    driver.close()
    assert store.read_bytes() == b"somebody else's"
    os.replace(store.with_name("moved"), store)
    check(rig, Promises(stored=set(KEPT), deleted={5}), NUMBERS)


# -- permissions, as somebody who is not root --------------------------------------------------------

_NOBODY = 65534


def as_nobody(path: Path, work: Callable[[], None]) -> None:
    """Run ``work`` without root's power over files, in a child; ``path`` and all below is its own."""
    if os.getuid() == 0:
        for each in (path, *path.rglob("*")):
            os.chown(each, _NOBODY, _NOBODY)

    def run(say: Callable[[str], None], _wait: Callable[[], None]) -> None:
        if os.getuid() == 0:
            os.setgroups([])
            os.setgid(_NOBODY)
            os.setuid(_NOBODY)
        work()
        say("fine")

    with child(run) as process:
        said = []
        while line := process.line():
            said.append(line)
    assert said == ["fine"], "\n".join(said)


def refused(rig: Rig, *names: str) -> None:
    with pytest.raises(KVFerryError) as caught:
        rig.open()
    assert any(name in caught.value.why for name in names), caught.value
    assert caught.value.remedy
    assert caught.value.where.startswith(str(rig.path))


@pytest.mark.parametrize("which", ["path", "folder", "owner", "store"])
def test_what_may_not_be_touched_is_told_and_works_once_it_may(rig: Rig, which: str) -> None:
    closed = {
        "path": rig.path,
        "folder": rig.store.parent,
        "owner": rig.store.parent / "owner",
        "store": rig.store,
    }[which]

    def work() -> None:
        before = closed.stat().st_mode
        closed.chmod(0)
        refused(rig, "EACCES")
        closed.chmod(before)
        check(rig, Promises(stored=set(KEPT)), NUMBERS)

    as_nobody(rig.path.parent, work)


def test_permissions_that_are_taken_away_from_an_open_store_cost_nothing_while_it_is_open(rig: Rig) -> None:
    def work() -> None:
        driver = rig.open()
        rig.store.chmod(0)
        driver.expect(chunks(KEPT))
        driver.store(chunks([3]))
        folder = rig.store.parent
        folder.chmod(0)
        for result in driver.write(chunks([5])):
            clear(result, "EACCES")
        folder.chmod(0o755)
        driver.expect(chunks([*KEPT, 3]))
        driver.close()
        refused(rig, "EACCES")
        rig.store.chmod(0o644)
        check(rig, Promises(stored={*KEPT, 3}, deleted={5}), NUMBERS)

    as_nobody(rig.path.parent, work)


def test_a_limit_of_file_sizes_makes_the_tier_smaller_and_fails_nothing(rig: Rig) -> None:
    def work() -> None:
        large = evolve(rig, slots=400)
        resource.setrlimit(
            resource.RLIMIT_FSIZE, (large.store.stat().st_size + 10 * 8192, resource.RLIM_INFINITY)
        )
        _fill_and_restart(large, 100)

    as_nobody(rig.path.parent, work)


# -- real file systems -------------------------------------------------------------------------------


def _fill_and_restart(rig: Rig, first: int) -> None:
    """The disk ends before the capacity does: what was acknowledged stays, the rest is told to have no
    space, and after deletions there is as much room as before."""
    driver = rig.open()
    stored = {each for each in KEPT if key(each) in {header.key for header in driver.recovered}}
    for at in range(first, first + rig.slots, 16):
        results = driver.write(chunks(range(at, at + 16)))
        assert {result.status for result in results} <= {WriteStatus.STORED, WriteStatus.NO_SPACE}, told(
            *results
        )
        stored |= {at + n for n, result in enumerate(results) if result.status is WriteStatus.STORED}
        if any(result.status is WriteStatus.NO_SPACE for result in results):
            break
    assert 8 < len(stored) < rig.slots
    driver.expect(chunks(sorted(stored)))
    gone = sorted(stored)[:5]
    driver.delete([key(number) for number in gone])
    fresh = range(first + 10_000, first + 10_005)
    driver.store(chunks(fresh))
    (result,) = driver.write(chunks([first + 20_000]))
    assert result.status is WriteStatus.NO_SPACE
    driver.close()
    stored = stored - set(gone) | set(fresh)
    known = [*stored, *gone]
    assert check(rig, Promises(stored=stored, deleted=set(gone)), known, refill=False) == stored


MOUNTS: dict[str, Callable[[Path, int], object]] = {"tmpfs": mount_memory, "ext4": mount_ext4}


@pytest.fixture(params=MOUNTS.values(), ids=MOUNTS)
def mount(request: pytest.FixtureRequest) -> Callable[[Path, int], object]:
    found: Callable[[Path, int], object] = request.param
    return found


def test_a_disk_that_is_smaller_than_the_capacity_fills_up_and_fails_nothing(
    tmp_path: Path, io_path: IOPath, mount: Callable[[Path, int], object]
) -> None:
    def work() -> None:
        mount(tmp_path / "disk", 3)
        _fill_and_restart(Rig(path=tmp_path / "disk" / "store", io=io_path, slots=1000), 100)

    with_mounts(work)


def test_a_disk_that_others_filled_still_serves_and_takes_more_when_there_is_room(
    tmp_path: Path, io_path: IOPath, mount: Callable[[Path, int], object]
) -> None:
    """The owner's name cannot even be written then."""

    def work() -> None:
        disk = tmp_path / "disk"
        mount(disk, 8)
        rig = Rig(path=disk / "store", io=io_path, slots=8)
        driver = rig.open()
        driver.store(chunks(KEPT))
        driver.close()
        os.truncate(rig.store.parent / "owner", 0)
        os.truncate(rig.store, rig.store.stat().st_size - 3 * 8192)
        _fill(disk / "others")
        driver = rig.open()
        driver.expect(chunks(KEPT))
        results = driver.write(chunks(range(10, 16)))
        kinds = [result.status for result in results]
        assert kinds == [WriteStatus.STORED] * 2 + [WriteStatus.NO_SPACE] * 4
        assert driver.delete([key(0)]) == [DeleteStatus.DELETED]
        driver.store(chunks([16]))
        (disk / "others").unlink()
        driver.store(chunks([17, 18, 20]))
        driver.close()
        check(rig, Promises(stored={1, 2, 10, 11, 16, 17, 18, 20}, deleted={0}), [0, 1, 2, *range(10, 21)])

    with_mounts(work)


def _fill(path: Path) -> None:
    """Take every byte that is left."""
    with open(path, "wb", buffering=0) as file:
        for size in (MIB // 4, 4096, 512, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise


def test_a_disk_mounted_read_only_is_told_and_works_once_it_can_be_written(
    tmp_path: Path, io_path: IOPath, mount: Callable[[Path, int], object]
) -> None:
    def work() -> None:
        disk = tmp_path / "disk"
        mount(disk, 8)
        rig = Rig(path=disk / "store", io=io_path, slots=SLOTS)
        driver = rig.open()
        driver.store(chunks(KEPT))
        driver.close()
        command("mount", "-o", "remount,ro", str(disk))
        refused(rig, "EROFS")
        command("mount", "-o", "remount,rw", str(disk))
        check(rig, Promises(stored=set(KEPT)), NUMBERS)

    with_mounts(work)


def test_a_disk_that_becomes_read_only_under_an_open_store_goes_on_serving(
    tmp_path: Path, io_path: IOPath
) -> None:
    """As ext4 does it after an error, with files open for writing."""

    def work() -> None:
        disk = tmp_path / "disk"
        error = mount_ext4(disk, 8)
        rig = Rig(path=disk / "store", io=io_path, slots=SLOTS)
        driver = rig.open()
        driver.store(chunks(KEPT))
        try:
            error.write_text("1")
        except OSError as raised:
            raise NotPermitted(f"no error can be had of ext4 here: {raised}") from raised
        (result,) = driver.write(chunks([3]))
        clear(result, "EROFS", "EIO")
        ticket = driver.submit_delete([key(0)])
        driver.finish(ticket)
        clear(ticket.results[0], "EROFS", "EIO")
        driver.expect(chunks(KEPT))
        driver.close()
        refused(rig, "EROFS")
        command("umount", str(disk))
        command("mount", "-o", "loop", str(disk.with_suffix(".disk")), str(disk))
        check(rig, Promises(stored={1, 2}), NUMBERS)

    with_mounts(work)
