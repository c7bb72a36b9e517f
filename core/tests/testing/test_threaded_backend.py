"""What :class:`ThreadedBackend` adds to a store whose calls block, beyond what the suite demands."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from kvferry.api import (
    BackendContext,
    ChunkHeader,
    ChunkKey,
    DeleteStatus,
    ErrorKind,
    KVFerryError,
    ReadStatus,
    Retry,
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
