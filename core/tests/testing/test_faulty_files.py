"""Files with faults below a plugin, and what a power failure leaves."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
import threading
from pathlib import Path
from textwrap import dedent

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.api import KVFerryError
from kvferry.testing.faults import (
    Crash,
    Delay,
    DoubleCompletion,
    Fail,
    Fault,
    FaultPlan,
    FlipBit,
    InjectedCrash,
    NoSpace,
    ShortWrite,
    Stall,
    TornWrite,
)
from kvferry.testing.faulty_files import FaultyFiles


def make(root: Path, *faults: Fault) -> FaultyFiles:
    return FaultyFiles(root, FaultPlan(faults))


def put(files: FaultyFiles, name: str, data: bytes, *, fsync: bool = False) -> None:
    descriptor = files.open(files.root / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        files.write(descriptor, data)
        if fsync:
            files.fsync(descriptor)
    finally:
        files.close(descriptor)


def sync_folder(files: FaultyFiles, name: str = ".") -> None:
    descriptor = files.open(files.root / name, os.O_RDONLY | os.O_DIRECTORY)
    files.fsync(descriptor)
    files.close(descriptor)


def publish(files: FaultyFiles, name: str, data: bytes) -> None:
    """The way that survives: write aside, sync, rename, sync the folder."""
    put(files, f"{name}.tmp", data, fsync=True)
    files.rename(files.root / f"{name}.tmp", files.root / name)
    sync_folder(files)


def left(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_without_faults_it_is_the_file_system(tmp_path: Path) -> None:
    files = make(tmp_path)
    files.mkdir(tmp_path / "sub")
    put(files, "sub/a", b"alpha")
    files.rename(tmp_path / "sub/a", tmp_path / "sub/b")
    descriptor = files.open(tmp_path / "sub/b", os.O_RDWR)
    assert files.pwrite(descriptor, b"A", 0) == 1
    assert files.pread(descriptor, 10, 1) == b"lpha"
    assert files.read(descriptor, 10) == b"Alpha"
    files.ftruncate(descriptor, 2)
    assert files.fstat(descriptor).st_size == files.stat(tmp_path / "sub/b").st_size == 2
    files.close(descriptor)
    assert files.listdir(tmp_path / "sub") == ["b"]
    files.unlink(tmp_path / "sub/b")
    assert left(tmp_path) == {}


def test_errors_come_as_the_system_would_raise_them(tmp_path: Path) -> None:
    files = make(
        tmp_path,
        Fault("open", Fail(errno=errno.EACCES), subject="locked"),
        Fault("write", NoSpace(), nth=2),
    )
    with pytest.raises(PermissionError):
        put(files, "locked", b"x")
    put(files, "a", b"x")
    with pytest.raises(OSError, match="No space left") as caught:
        put(files, "b", b"x")
    assert caught.value.errno == errno.ENOSPC
    assert left(tmp_path) == {"a": b"x", "b": b""}


def test_a_torn_write_leaves_its_beginning(tmp_path: Path) -> None:
    files = make(tmp_path, Fault("write", TornWrite(3), nth=1))
    with pytest.raises(OSError, match="torn"):
        put(files, "a", b"abcdef")
    assert left(tmp_path) == {"a": b"abc"}


def test_a_short_write_says_so(tmp_path: Path) -> None:
    files = make(tmp_path, Fault("write", ShortWrite(2), nth=1))
    descriptor = files.open(tmp_path / "a", os.O_WRONLY | os.O_CREAT)
    assert files.write(descriptor, memoryview(b"abcdef")) == 2
    assert files.write(descriptor, b"cdef") == 4
    files.close(descriptor)
    assert left(tmp_path) == {"a": b"abcdef"}


@given(data=st.binary(min_size=1, max_size=40), bit=st.integers(0, 1000), reading=st.booleans())
def test_a_flipped_bit_is_one_bit(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, bit: int, reading: bool
) -> None:
    root = tmp_path_factory.mktemp("flip")
    files = make(root, Fault("read" if reading else "write", FlipBit(bit), nth=1))
    put(files, "a", data)
    descriptor = files.open(root / "a", os.O_RDONLY)
    found = files.read(descriptor, 100)
    files.close(descriptor)
    difference = int.from_bytes(found, "little") ^ int.from_bytes(data, "little")
    assert len(found) == len(data)
    assert difference == 1 << bit % (8 * len(data))


def test_a_delay_uses_the_clock_it_was_given(tmp_path: Path) -> None:
    slept: list[float] = []
    files = FaultyFiles(tmp_path, FaultPlan([Fault("fsync", Delay(7.5))]), sleep=slept.append)
    put(files, "a", b"x", fsync=True)
    assert slept == [7.5]


def test_a_stalled_call_waits_for_its_release(tmp_path: Path) -> None:
    files = make(tmp_path, Fault("fsync", Stall(), nth=1))
    done = threading.Event()

    def work() -> None:
        put(files, "a", b"x", fsync=True)
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    assert not done.wait(0.05)
    files.release()
    assert done.wait(20)
    thread.join()


def test_what_was_published_survives_the_power(tmp_path: Path) -> None:
    files = make(tmp_path)
    publish(files, "a", b"first")
    put(files, "a.tmp", b"second")
    files.power_failure()
    assert left(tmp_path) == {"a": b"first"}


def test_what_was_not_synced_is_gone(tmp_path: Path) -> None:
    files = make(tmp_path)
    put(files, "content-only", b"x", fsync=True)
    put(files, "neither", b"x")
    files.power_failure()
    assert left(tmp_path) == {}
    put(files, "name-only", b"x")
    sync_folder(files)
    files.power_failure()
    assert left(tmp_path) == {"name-only": b""}


def test_a_rename_that_was_not_synced_is_undone(tmp_path: Path) -> None:
    files = make(tmp_path)
    publish(files, "a", b"old")
    put(files, "a.tmp", b"new", fsync=True)
    files.rename(tmp_path / "a.tmp", tmp_path / "a")
    files.power_failure()
    assert left(tmp_path) == {"a": b"old"}


def test_a_deletion_that_was_not_synced_is_undone(tmp_path: Path) -> None:
    files = make(tmp_path)
    publish(files, "a", b"old")
    files.unlink(tmp_path / "a")
    put(files, "b", b"may well get the number of the file that went", fsync=True)
    files.power_failure()
    assert left(tmp_path) == {"a": b"old"}


def test_after_the_failure_the_disk_is_what_it_is(tmp_path: Path) -> None:
    files = make(tmp_path)
    publish(files, "a", b"old")
    files.power_failure()
    put(files, "b", b"new")
    files.power_failure()
    assert left(tmp_path) == {"a": b"old"}


def test_open_descriptors_are_gone(tmp_path: Path) -> None:
    files = make(tmp_path)
    descriptor = files.open(tmp_path / "a", os.O_WRONLY | os.O_CREAT)
    files.power_failure()
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(descriptor)


@given(seed=st.integers(0, 10**6))
def test_by_chance_any_part_may_survive_and_what_is_certain_does(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    root = tmp_path_factory.mktemp("chance")
    files = make(root)
    publish(files, "kept", b"k" * 9000)
    put(files, "new", b"n" * 9000)
    files.power_failure(random.Random(seed))
    found = left(root)
    assert found.pop("kept") == b"k" * 9000
    assert found.keys() <= {"new"}
    assert set(found.get("new", b"")) <= set(b"n\x00")


def test_chance_has_several_outcomes(tmp_path: Path) -> None:
    outcomes = set()
    for seed in range(40):
        root = tmp_path / str(seed)
        root.mkdir()
        files = make(root)
        publish(files, "a", b"o" * 5000)
        put(files, "b", b"n" * 5000)
        files.rename(root / "b", root / "a")
        files.power_failure(random.Random(seed))
        found = left(root)
        outcomes.add(tuple(sorted((name, len(data), data[:1]) for name, data in found.items())))
    assert (("a", 5000, b"o"),) in outcomes
    assert len(outcomes) > 3


def test_a_crash_goes_through_every_handler(tmp_path: Path) -> None:
    files = make(tmp_path, Fault("rename", Crash(), nth=1))
    with pytest.raises(InjectedCrash):
        publish(files, "a", b"x")
    files.power_failure()
    assert left(tmp_path) == {}


def test_a_child_can_really_die(tmp_path: Path) -> None:
    code = f"""
        import os
        from pathlib import Path
        from kvferry.testing.faults import Crash, CrashBy, Fault, FaultPlan
        from kvferry.testing.faulty_files import FaultyFiles

        plan = FaultPlan([Fault("write", Crash(CrashBy.EXITING), nth=2)])
        files = FaultyFiles(Path({str(tmp_path)!r}), plan)
        descriptor = files.open(files.root / "a", os.O_WRONLY | os.O_CREAT)
        files.write(descriptor, b"one")
        files.write(descriptor, b"two")
    """
    done = subprocess.run([sys.executable, "-c", dedent(code)], check=False, timeout=60)
    assert done.returncode == 137
    assert left(tmp_path) == {"a": b"one"}


def test_a_fault_that_files_never_meet_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KVFerryError, match="cannot do DoubleCompletion to 'write'"):
        make(tmp_path, Fault("write", DoubleCompletion()))
