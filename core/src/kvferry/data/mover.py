"""Executes transfers of one rank: a thread that copies between the engine's pages and an arena.

Loads go before saves, and both are cut into pieces, so that a load never waits behind a long save
and a flush never waits for more than one piece plus what it asked for.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator

from attrs import asdict, define, evolve, field, frozen

from kvferry.api import KVFerryError, Region
from kvferry.data.copy import SpanCopier
from kvferry.data.engine_side import EngineSide
from kvferry.data.plans import Direction, Transfer, TransferResult
from kvferry.data.priorities import leave_the_engines_core

logger = logging.getLogger(__name__)

PIECE_BYTES = 8 << 20
"""Bytes per uninterrupted copy: half a millisecond at 16 GB/s."""


@frozen
class MoverStatistics:
    """Totals since :meth:`Mover.open`. Seconds are time spent copying, not waiting; a verified
    block is one of one group."""

    saved_bytes: int = 0
    saved_seconds: float = 0.0
    loaded_bytes: int = 0
    loaded_seconds: float = 0.0
    failed_transfers: int = 0
    verified_blocks: int = 0
    mismatched_blocks: int = 0

    def plus(self, other: MoverStatistics) -> MoverStatistics:
        """The totals of both."""
        return _evolve(self, **asdict(other))


@frozen
class _Piece:
    """Rows of one group that are copied without a pause."""

    group: int
    start: int
    stop: int

    @property
    def rows(self) -> slice:
        return slice(self.start, self.stop)


@define
class _Job:
    transfer: Transfer
    pieces: Iterator[_Piece]
    failed: dict[int, str] = field(factory=dict)
    checked: bool = False
    """Its rows name memory that exists; looked at once, before the first piece."""

    def give_up(self, reason: str) -> None:
        """Copy no further; everything counts as failed."""
        self.failed.update(dict.fromkeys(self.transfer.slot_numbers(), reason))
        self.pieces = iter(())


ResultCallback = Callable[[Transfer, TransferResult], None]


class Mover:
    """Runs the transfers of one rank on a thread of its own.

    Threads: every method may be called from any thread. ``on_result`` is called once per submitted
    transfer, from the mover's thread, without its lock. The clock is monotonic seconds and only
    measures durations.
    """

    def __init__(
        self,
        engine: EngineSide,
        arena: Region,
        copier: SpanCopier,
        on_result: ResultCallback,
        *,
        verify: bool = False,
        piece_bytes: int = PIECE_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._arena = arena
        self._slots = engine.layout.slots_in(arena.length)
        self._copier = copier
        self._on_result = on_result
        self._clock = clock
        self._piece_rows = tuple(max(1, piece_bytes // size) for size in engine.layout.block_bytes)
        self._digests: dict[tuple[int, int, int], bytes] | None = {} if verify else None
        self._changed = threading.Condition()
        self._queues: dict[Direction, deque[_Job]] = {Direction.LOAD: deque(), Direction.SAVE: deque()}
        self._pending: dict[tuple[str, Direction], int] = {}
        self._urgent: set[str] = set()
        self._closing = False
        self._thread: threading.Thread | None = None
        self._statistics = MoverStatistics()

    def open(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._run, name="kvferry-mover", daemon=True)
        self._thread.start()

    def submit(self, transfers: Collection[Transfer]) -> None:
        """Queue transfers. After :meth:`close` they fail at once."""
        with self._changed:
            closing = self._closing
            for transfer in () if closing else transfers:
                self._queues[transfer.direction].append(_Job(transfer, self._pieces_of(transfer)))
                owner = (transfer.request_id, transfer.direction)
                self._pending[owner] = self._pending.get(owner, 0) + 1
            self._changed.notify_all()
        if closing:
            for transfer in transfers:
                self._on_result(transfer, _failed(transfer, "the data plane is closing"))

    def run_now(self, transfer: Transfer) -> TransferResult:
        """Execute one transfer in the calling thread. The caller reports the result itself."""
        job = _Job(transfer, self._pieces_of(transfer))
        while (piece := next(job.pieces, None)) is not None:
            self._copy_or_fail(job, piece)
        return self._result(job)

    def filled(self, slots: Collection[int]) -> None:
        """These slots were filled from elsewhere, and nobody writes them now: with ``verify``, what they hold
        is what later loads are compared with."""
        if self._digests is None:
            return
        layout = self._engine.layout
        for slot in slots:
            at = self._arena.address + slot * layout.total_bytes
            for group, (blocks, size) in enumerate(
                zip(layout.blocks_per_slot, layout.block_bytes, strict=True)
            ):
                for position in range(blocks):
                    block = (ctypes.c_ubyte * size).from_address(at)
                    self._digests[group, slot, position] = hashlib.sha256(block).digest()
                    at += size

    def pending(self, request_id: str, direction: Direction) -> int:
        """How many transfers of a request have no result yet."""
        with self._changed:
            return self._pending.get((request_id, direction), 0)

    def finish_saves(self, request_ids: Collection[str], timeout: float) -> bool:
        """Wait until no save of these requests reads the engine's blocks any more.

        They go ahead of all other work. What is not done after ``timeout`` seconds is dropped and
        reported as failed. Returns whether nothing had to be dropped.
        """
        wanted = set(request_ids)
        with self._changed:
            if not self._saves_of(wanted):
                return True
            self._urgent |= wanted
            self._changed.notify_all()
            done = self._changed.wait_for(lambda: not self._saves_of(wanted), timeout)
            if not done:
                for job in self._queues[Direction.SAVE]:
                    if job.transfer.request_id in wanted:
                        job.give_up("dropped")
                # At most one piece is being copied; a copy is never abandoned half way.
                self._changed.notify_all()
                self._changed.wait_for(lambda: not self._saves_of(wanted))
            self._urgent -= wanted
            return done

    def wait_for_end(self, saves_of: Collection[str], timeout: float) -> bool:
        """Wait until one more load, or one more save of these requests, has ended.

        Returns at once when none is pending, and False at the timeout.
        """
        with self._changed:
            before = self._pending_of(saves_of)
            return before == 0 or self._changed.wait_for(lambda: self._pending_of(saves_of) < before, timeout)

    def statistics(self) -> MoverStatistics:
        with self._changed:
            return self._statistics

    def close(self, timeout: float) -> bool:
        """Fail what is queued, end the thread. Idempotent. Returns whether the thread ended."""
        with self._changed:
            self._closing = True
            for queue in self._queues.values():
                for job in queue:
                    job.give_up("closed")
            self._changed.notify_all()
        if self._thread is None:
            return True
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _saves_of(self, request_ids: set[str]) -> bool:
        return any((request_id, Direction.SAVE) in self._pending for request_id in request_ids)

    def _pending_of(self, saves_of: Collection[str]) -> int:
        return sum(
            count
            for (request_id, direction), count in self._pending.items()
            if direction is Direction.LOAD or request_id in saves_of
        )

    def _run(self) -> None:
        leave_the_engines_core()
        while (job := self._next()) is not None:
            piece = next(job.pieces, None)
            if piece is None:
                self._finish(job)
                continue
            self._copy_or_fail(job, piece)

    def _copy_or_fail(self, job: _Job, piece: _Piece) -> None:
        try:
            self._copy(job, piece)
        except Exception as error:  # noqa: BLE001 - a bug in one transfer must not strand the others
            job.give_up(repr(error))

    def _next(self) -> _Job | None:
        """The job whose next piece should run; it stays queued until it is finished."""
        with self._changed:
            while True:
                saves = self._queues[Direction.SAVE]
                if self._urgent:
                    for job in saves:
                        if job.transfer.request_id in self._urgent:
                            return job
                for queue in (self._queues[Direction.LOAD], saves):
                    if queue:
                        return queue[0]
                if self._closing:
                    return None
                self._changed.wait()

    def _finish(self, job: _Job) -> None:
        result = self._result(job)
        # The result goes out first: whoever sees that nothing is pending may rely on it.
        try:
            self._on_result(job.transfer, result)
        except Exception:
            # Without this thread every later transfer would wait for ever.
            logger.exception("kvferry: the result of a transfer could not be told")
        owner = (job.transfer.request_id, job.transfer.direction)
        with self._changed:
            self._queues[job.transfer.direction].remove(job)
            self._pending[owner] -= 1
            if not self._pending[owner]:
                del self._pending[owner]
            self._changed.notify_all()

    def _pieces_of(self, transfer: Transfer) -> Iterator[_Piece]:
        for group, rows in enumerate(transfer.groups):
            step = self._piece_rows[min(group, len(self._piece_rows) - 1)]
            for start in range(0, len(rows), step):
                yield _Piece(group, start, min(len(rows), start + step))

    def _copy(self, job: _Job, piece: _Piece) -> None:
        transfer = job.transfer
        started = self._clock()
        try:
            if not job.checked:
                self._engine.check(transfer, self._slots)
                job.checked = True
        except KVFerryError as error:
            job.give_up(str(error))
            return
        spans = self._engine.spans(transfer, self._arena, piece.group, piece.rows)
        try:
            self._copier.copy(*spans)
        except KVFerryError:
            self._copy_slot_by_slot(job, piece)
        if self._digests is not None:
            self._audit(job, piece)
        self._count(transfer.direction, int(spans[2].sum()), self._clock() - started)

    def _copy_slot_by_slot(self, job: _Job, piece: _Piece) -> None:
        """Find out which slots fail, so that no other is reported."""
        column = job.transfer.groups[piece.group].slot_column
        start = piece.start
        while start < piece.stop:
            end = start + 1
            while end < piece.stop and column[end] == column[start]:
                end += 1
            rows = slice(start, end)
            try:
                self._copier.copy(*self._engine.spans(job.transfer, self._arena, piece.group, rows))
            except KVFerryError as error:
                job.failed[int(column[start])] = str(error)
            start = end

    def _audit(self, job: _Job, piece: _Piece) -> None:
        """Digest the engine's own pages after a gather, and compare after a scatter."""
        assert self._digests is not None
        rows = job.transfer.groups[piece.group]
        verified = mismatched = 0
        for row in range(piece.start, piece.stop):
            slot = int(rows.slot_column[row])
            place = (piece.group, slot, int(rows.position_column[row]))
            if slot in job.failed:
                continue
            digest = self._digest(job.transfer, piece.group, row)
            if job.transfer.direction is Direction.SAVE:
                self._digests[place] = digest
                continue
            verified += 1
            if self._digests.get(place) != digest:
                mismatched += 1
                job.failed[slot] = "the restored bytes differ from those that were stored"
        with self._changed:
            self._statistics = _evolve(
                self._statistics, verified_blocks=verified, mismatched_blocks=mismatched
            )

    def _digest(self, transfer: Transfer, group: int, row: int) -> bytes:
        destination, source, length = self._engine.spans(transfer, self._arena, group, slice(row, row + 1))
        engine = source if transfer.direction is Direction.SAVE else destination
        digest = hashlib.sha256()
        for address, size in zip(engine.tolist(), length.tolist(), strict=True):
            digest.update(_view(address, size))
        return digest.digest()

    def _count(self, direction: Direction, size: int, seconds: float) -> None:
        with self._changed:
            if direction is Direction.SAVE:
                self._statistics = _evolve(self._statistics, saved_bytes=size, saved_seconds=seconds)
            else:
                self._statistics = _evolve(self._statistics, loaded_bytes=size, loaded_seconds=seconds)

    def _result(self, job: _Job) -> TransferResult:
        if not job.failed:
            return TransferResult(id=job.transfer.id)
        with self._changed:
            self._statistics = _evolve(self._statistics, failed_transfers=1)
        return TransferResult(
            id=job.transfer.id,
            failed_slots=tuple(sorted(job.failed)),
            reason=next(iter(job.failed.values())),
        )


def _view(address: int, size: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * size).from_address(address))


def _failed(transfer: Transfer, reason: str) -> TransferResult:
    return TransferResult(id=transfer.id, failed_slots=tuple(transfer.slot_numbers()), reason=reason)


def _evolve(statistics: MoverStatistics, **added: float) -> MoverStatistics:
    return evolve(statistics, **{name: getattr(statistics, name) + more for name, more in added.items()})
