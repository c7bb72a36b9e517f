"""What :class:`ThreadedBackend` adds to a store whose calls block, beyond what the suite demands."""

from __future__ import annotations

import ctypes
import threading
import traceback
from collections.abc import Iterator
from typing import Any

import pytest
from attrs import evolve

from kvferry.api import (
    BackendContext,
    ChunkHeader,
    ChunkKey,
    DeleteStatus,
    ErrorKind,
    KVFerryError,
    ReadStatus,
    Region,
    Retry,
    Span,
    ThreadedBackend,
    Ticket,
    WriteStatus,
)
from kvferry.testing.backends import NullArena

PATIENCE = 20.0
NOW = 1000.0


class GatedStore(ThreadedBackend):
    """Deletes when the gate is open; a digest of ones raises what the test says."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.entered = threading.Event()
        self.error: Exception = RuntimeError("not set")
        self.opened = self.closed = 0
        self.refuses = False

    def open_store(self, context: BackendContext) -> None:
        if self.refuses:
            raise KVFerryError("no", kind=ErrorKind.IO)
        self.opened += 1

    def close_store(self) -> None:
        self.closed += 1

    def write_one(self, header: ChunkHeader, value: memoryview) -> WriteStatus:
        raise AssertionError("not asked for")

    def read_one(self, key: ChunkKey, into: memoryview) -> ReadStatus:
        raise AssertionError("not asked for")

    def delete_one(self, key: ChunkKey) -> DeleteStatus:
        self.entered.set()
        assert self.gate.wait(PATIENCE)
        if key == BAD:
            raise self.error
        return DeleteStatus.ABSENT


GOOD, BAD = ChunkKey(bytes(32), bytes(32)), ChunkKey(bytes(32), b"\xff" * 32)
CONTEXT = BackendContext(
    name="t", rank=0, make_arena=lambda _name, _capacity, _options: NullArena(), clock=lambda: NOW
)


@pytest.fixture
def store() -> Iterator[GatedStore]:
    store = GatedStore()
    yield store
    store.gate.set()
    store.close(NOW + PATIENCE)


def kinds(ticket: Ticket[DeleteStatus]) -> list[ErrorKind | None]:
    assert ticket.wait(PATIENCE)
    return [None if result.error is None else result.error.kind for result in ticket.results]


def test_submitting_does_not_wait_for_the_store(store: GatedStore) -> None:
    store.open(CONTEXT)
    tickets = [store.delete([GOOD], NOW + 1) for _ in range(3)]
    assert store.entered.wait(PATIENCE)
    assert [ticket.done for ticket in tickets] == [False] * 3
    store.gate.set()
    assert [kinds(ticket) for ticket in tickets] == [[None]] * 3


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (KVFerryError("gone", kind=ErrorKind.PROTOCOL, retry=Retry.NEVER), ErrorKind.PROTOCOL),
        (OSError(5, "broken"), ErrorKind.IO),
        (ZeroDivisionError("bug"), ErrorKind.INTERNAL),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_an_item_that_raises_fails_alone(store: GatedStore, error: Exception, kind: ErrorKind) -> None:
    store.open(CONTEXT)
    store.gate.set()
    store.error = error
    ticket = store.delete([GOOD, BAD, GOOD], NOW + 1)
    assert kinds(ticket) == [None, kind, None]
    assert ticket.results[1].status is DeleteStatus.FAILED
    told = ticket.results[1].error
    assert told is not None
    assert error in (told, told.__cause__)
    assert error.__traceback__ is not None
    assert "delete_one" in {frame.name for frame in traceback.extract_tb(error.__traceback__)}
    assert kinds(store.delete([GOOD], NOW + 1)) == [None], "the thread is still there"


def test_items_behind_a_cancellation_do_not_begin(store: GatedStore) -> None:
    store.open(CONTEXT)
    ticket = store.delete([GOOD, GOOD, GOOD], NOW + 1)
    assert store.entered.wait(PATIENCE)
    ticket.cancel()
    store.gate.set()
    assert kinds(ticket) == [None, ErrorKind.CANCELLED, ErrorKind.CANCELLED]


def test_items_behind_a_deadline_do_not_begin(store: GatedStore) -> None:
    store.open(CONTEXT)
    store.gate.set()
    assert kinds(store.delete([GOOD, GOOD], NOW)) == [ErrorKind.TIMEOUT] * 2
    assert kinds(store.delete([GOOD], NOW + 0.001)) == [None]


def test_closing_waits_until_the_deadline_and_can_be_done_again(store: GatedStore) -> None:
    store.open(CONTEXT)
    under_way = store.delete([GOOD, GOOD], NOW + 1)
    assert store.entered.wait(PATIENCE)
    waiting = store.delete([GOOD], NOW + 1)
    with pytest.raises(KVFerryError) as caught:
        store.close(NOW)
    assert caught.value.kind is ErrorKind.TIMEOUT
    assert kinds(waiting) == [ErrorKind.CLOSED]
    assert not under_way.done
    assert store.closed == 0, "a store that works is not closed"
    store.gate.set()
    store.close(NOW + PATIENCE)
    assert kinds(under_way) == [None, ErrorKind.CLOSED]
    assert store.closed == 1


def test_a_store_that_cannot_be_opened_is_not_open(store: GatedStore) -> None:
    store.refuses = True
    with pytest.raises(KVFerryError, match="no"):
        store.open(CONTEXT)
    with pytest.raises(KVFerryError) as caught:
        store.delete([GOOD], NOW + 1)
    assert caught.value.kind is ErrorKind.CLOSED
    store.close(NOW + PATIENCE)
    assert (store.opened, store.closed) == (0, 0)


def test_a_closed_backend_stays_closed(store: GatedStore) -> None:
    store.open(CONTEXT)
    store.close(NOW + PATIENCE)
    store.close(NOW + PATIENCE)
    with pytest.raises(KVFerryError, match="opened once"):
        store.open(CONTEXT)
    assert (store.opened, store.closed) == (1, 1)


def test_several_threads_work_at_once() -> None:
    barrier = threading.Barrier(3)

    class Wide(GatedStore):
        threads = 3

        def delete_one(self, key: ChunkKey) -> DeleteStatus:
            barrier.wait(PATIENCE)
            return DeleteStatus.ABSENT

    store = Wide()
    store.open(CONTEXT)
    tickets = [store.delete([GOOD], NOW + 1) for _ in range(3)]
    assert [kinds(ticket) for ticket in tickets] == [[None]] * 3
    store.close(NOW + PATIENCE)


@pytest.mark.parametrize(
    ("returned", "complaint"),
    [
        (None, "delete_one returned None, not a DeleteStatus"),
        (True, "delete_one returned True, not a DeleteStatus"),
        (b"a chunk's bytes", "delete_one returned a bytes, not a DeleteStatus"),
        (ReadStatus.MISS, "delete_one returned a ReadStatus, not a DeleteStatus"),
        (DeleteStatus.FAILED, "delete_one returned DeleteStatus.FAILED"),
    ],
)
def test_a_method_that_returns_something_else_is_told_so(returned: Any, complaint: str) -> None:
    class Careless(GatedStore):
        def delete_one(self, key: ChunkKey) -> DeleteStatus:
            return returned if key == BAD else DeleteStatus.DELETED

    store = Careless()
    store.open(CONTEXT)
    ticket = store.delete([GOOD, BAD, GOOD], NOW + 1)
    assert kinds(ticket) == [None, ErrorKind.INTERNAL, None]
    error = ticket.results[1].error
    assert error is not None
    assert error.what == complaint
    assert error.remedy
    store.close(NOW + PATIENCE)


def test_a_constructor_that_was_not_called_is_told_by_every_call() -> None:
    class Bare(GatedStore):
        def __init__(self) -> None:
            pass

    store = Bare()
    for call in (lambda: store.open(CONTEXT), lambda: store.delete([GOOD], NOW + 1)):
        with pytest.raises(KVFerryError, match="Bare is not made completely") as caught:
            call()
        assert caught.value.remedy.endswith("super().__init__()")
    store.close(NOW + PATIENCE)


def test_the_limit_of_the_context_is_kept() -> None:
    written = []

    class Writing(GatedStore):
        def write_one(self, header: ChunkHeader, value: memoryview) -> WriteStatus:
            written.append(header.size)
            return WriteStatus.STORED

    memory = ctypes.create_string_buffer(64)
    region = Region(name="m", address=ctypes.addressof(memory), length=64, keep_alive=memory)
    for limit, kind in ((None, None), (33, None), (32, ErrorKind.CAPACITY)):
        store = Writing()
        store.open(evolve(CONTEXT, regions={"m": region}, max_value_bytes=limit))
        header = ChunkHeader(key=GOOD, parent=None, depth=0, tokens=16, size=33)
        ticket = store.write([(header, Span("m", 0, 33))], NOW + 1)
        assert ticket.wait(PATIENCE)
        error = ticket.results[0].error
        assert (None if error is None else error.kind) is kind
        store.close(NOW + PATIENCE)
    assert written == [33, 33]
