"""The owner's side of writes: peers ask, and threads of this process copy."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence

from kvferry.api import ErrorKind, KVFerryError, Retry
from kvferry_transport_local.active import Active
from kvferry_transport_local.batches import Batch, Outcome
from kvferry_transport_local.copying import Copier, Piece, check_span
from kvferry_transport_local.failures import cancelled, outside, taken_back
from kvferry_transport_local.frames import MAXIMUM_ROWS, Row, WriteRequest, WriteStop, Written, unpack_rows
from kvferry_transport_local.link import Broken, Link
from kvferry_transport_local.pool import Pool, Work
from kvferry_transport_local.regions import Regions
from kvferry_transport_local.remote import Way

MOST_REQUESTS = 4096
"""That all peers together may have under way."""
_MOST_REASONS = 16
_LONGEST_REASON = 500


class Serving:
    """Threads: the service thread asks; batches end in any."""

    def __init__(
        self,
        regions: Regions,
        copier: Copier,
        pool: Pool,
        active: Active,
        clock: Callable[[], float],
        where: str,
    ) -> None:
        self._regions = regions
        self._copier = copier
        self._pool = pool
        self._active = active
        self._clock = clock
        self._where = where
        self._lock = threading.Lock()
        self._under_way: dict[tuple[Link, int], Batch] = {}

    def request(self, link: Link, frame: WriteRequest) -> None:
        """Raises :class:`Broken` for what no peer asks."""
        try:
            rows = unpack_rows(frame.rows)
        except ValueError as error:
            raise Broken(str(error)) from error
        if len(rows) > MAXIMUM_ROWS or not math.isfinite(frame.deadline):
            raise Broken("it asked for more writes at once than a request holds, or without a deadline")
        key = (link, frame.number)

        def finish(outcomes: Sequence[Outcome]) -> None:
            with self._lock:
                self._under_way.pop(key, None)
            self._active.remove(batch)
            link.send(_answer(frame.number, outcomes))

        # The deadline is a time of the clock that all processes of a host share, so that a request which
        # lay in a stopped process is as old as it is.
        deadline = self._clock() + frame.deadline - time.monotonic()
        batch = Batch(len(rows), deadline, finish, lambda number: self._still(batch, number), link)
        with self._lock:
            if key in self._under_way:
                raise Broken("it used the number of a request again")
            full = len(self._under_way) >= MOST_REQUESTS
            self._under_way[key] = batch
        self._active.add(batch)
        if full:
            batch.abort(self._too_many())
            return
        whole = [piece for number, row in enumerate(rows) if (piece := self._piece(batch, link, number, row))]
        self._pool.put(Work(self._copier.steps(batch, link, whole)))
        batch.end_if_over()

    def stop(self, link: Link, frame: WriteStop) -> None:
        with self._lock:
            batch = self._under_way.get((link, frame.number))
        if batch is not None:
            batch.abort(cancelled(self._where))

    def _piece(self, batch: Batch, link: Link, number: int, row: Row) -> Piece | None:
        """What is to be copied; ``None`` for a row that is over by that."""
        local = self._regions.at(row.slot, row.generation)
        remote = link.memory_at(row.source_slot, row.source_generation)
        if local is None or remote is None:
            which = "to be written to" if local is None else "that the bytes come from"
            why = f"the region {which} is not registered any more"
            batch.fail(number, outside("what is registered", self._where, why))
            return None
        for what, offset, whole in (
            (local.region.name, row.offset, local.region.length),
            (remote.name, row.source_offset, remote.length),
        ):
            if (why := check_span(offset, row.length, whole)) != "":
                batch.fail(number, outside(f"the region {what!r}", self._where, why))
                return None
        if remote.way is Way.REFUSED:
            batch.fail(number, remote.refusal())
            return None
        batch.sides[number] = (local, remote)
        if row.length == 0:
            batch.advance([number])
            return None
        return Piece(number, local, row.offset, remote, row.source_offset, row.length)

    def _still(self, batch: Batch, number: int) -> Outcome:
        sides = batch.sides[number]
        if sides is not None and sides[0].gone:
            return taken_back(sides[0].region.name, self._where)
        return None

    def _too_many(self) -> KVFerryError:
        return KVFerryError(
            f"peers have {MOST_REQUESTS} requests to write under way, and there is room for no more",
            kind=ErrorKind.CAPACITY,
            where=self._where,
            remedy="write less at once",
            retry=Retry.LATER,
        )


def _answer(number: int, outcomes: Sequence[Outcome]) -> Written:
    """Equal failures share a reason; of more than there is room for, the last one stands for the rest."""
    reasons: list[tuple[str, str]] = []
    failed: list[tuple[int, int]] = []
    for row, error in enumerate(outcomes):
        if error is None:
            continue
        reason = (error.kind.value, "; ".join(filter(None, (error.what, error.why)))[:_LONGEST_REASON])
        if reason not in reasons and len(reasons) < _MOST_REASONS:
            reasons.append(reason)
        failed.append((row, reasons.index(reason) if reason in reasons else len(reasons) - 1))
    return Written(number, failed, reasons)
