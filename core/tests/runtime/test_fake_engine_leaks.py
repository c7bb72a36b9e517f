"""The leak guard sees each kind of thing that a test may leave behind, and forgives none."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest

from kvferry.control.lru import LRU
from kvferry.control.manager import CacheManager
from kvferry.control.outcomes import ChunkWrite
from kvferry.data.mapping import create_region
from kvferry.testing.leaks import LeakGuard


def new_manager() -> CacheManager:
    manager = CacheManager(
        capacity=4,
        chunk_tokens=8,
        block_tokens=4,
        policy=LRU(),
        lease_seconds=60.0,
        write_seconds=60.0,
    )
    manager.grow(4)
    return manager


def a_thread(_: LeakGuard) -> Callable[[], object]:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="left-behind")
    thread.start()
    return lambda: (stop.set(), thread.join())


def a_descriptor(_: LeakGuard) -> Callable[[], object]:
    descriptor = os.eventfd(0)
    return lambda: os.close(descriptor)


def a_memory_file(_: LeakGuard) -> Callable[[], object]:
    mapped = create_region("left-behind", 4096)
    return mapped.close


def a_segment(_: LeakGuard) -> Callable[[], object]:
    path = Path(f"/dev/shm/kvferry-left-behind-{os.getpid()}")
    path.write_bytes(b"")
    return path.unlink


def a_reservation(guard: LeakGuard) -> Callable[[], object]:
    manager = guard.watch(new_manager())
    write = ChunkWrite(digest=b"d" * 32, parent=None, depth=0, tokens=8)
    reservation = manager.reserve("somebody", "", [write], now=0.0)
    assert reservation.id is not None
    number = reservation.id
    return lambda: manager.complete(number, [0])


def a_lease(guard: LeakGuard) -> Callable[[], object]:
    manager = guard.watch(new_manager())
    a_write = ChunkWrite(digest=b"d" * 32, parent=None, depth=0, tokens=8)
    reservation = manager.reserve("somebody", "", [a_write], now=0.0)
    assert reservation.id is not None
    manager.complete(reservation.id, [0])
    lease = manager.match("reader", [b"d" * 32], lambda _: (), 0.0, 8).lease
    assert lease is not None
    number = lease
    return lambda: manager.release(number)


@pytest.mark.parametrize(
    ("take", "word"),
    [
        (a_thread, "thread left-behind"),
        (a_descriptor, "eventfd"),
        (a_memory_file, "memfd:kvferry:left-behind"),
        (a_segment, "shared memory segment"),
        (a_reservation, "reservations 1"),
        (a_lease, "leases 1"),
    ],
)
def test_what_is_left_behind_is_named_until_it_is_gone(
    take: Callable[[LeakGuard], Callable[[], object]], word: str
) -> None:
    guard = LeakGuard()
    assert guard.leaks(0.0) == []
    give_back = take(guard)
    try:
        assert any(word in leak for leak in guard.leaks(0.0)), guard.leaks(0.0)
    finally:
        give_back()
    assert guard.leaks(3.0) == []


def test_deferred_clean_up_is_given_a_moment() -> None:
    guard = LeakGuard()
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    assert guard.leaks(0.0)

    def sleep(seconds: float) -> None:
        stop.set()
        thread.join(seconds)

    assert guard.leaks(10.0, sleep=sleep) == []


def test_a_kind_that_may_stay_is_not_named() -> None:
    guard = LeakGuard(["threads", "memory", "slots"])
    descriptor = os.eventfd(0)
    try:
        assert guard.leaks(0.0) == []
    finally:
        os.close(descriptor)


def test_the_plugin_fails_the_test_that_leaks_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(
        dedent(
            """
            import os
            import pytest

            kept = []

            def test_clean():
                pass

            def test_leaks():
                kept.append(os.eventfd(0))

            @pytest.mark.may_leave("descriptors", reason="shows the mark")
            def test_may_leak():
                kept.append(os.eventfd(0))

            @pytest.mark.may_leave("descriptors")
            def test_without_a_reason():
                pass
            """
        )
    )
    command = [sys.executable, "-m", "pytest", "-p", "kvferry.testing.plugin", "-p", "no:cacheprovider"]
    ran = subprocess.run(
        [*command, "-q", "--strict-markers", "-c", os.devnull, "--rootdir", str(tmp_path), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert "3 passed, 2 errors" in ran.stdout, ran.stdout
    assert "the test left behind:\n  descriptor" in ran.stdout.replace("\nE     ", "\n  ")
    assert "and a reason" in ran.stdout
