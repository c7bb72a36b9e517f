"""The workers of a fake engine: order of a step, forward passes, and checks of every byte."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from kvferry.runtime.worker import StepReport, WorkerRuntime
from kvferry.testing.fake_memory import FakeMemory
from kvferry.testing.fake_requests import Batch, FakeRequest, Rounds, ScheduledRequest

_GARBAGE = np.uint64(0x6A5D39EAE116586D)
"""What a forward pass makes of wrong input: other histories than any right ones."""


class FakeWorkers:
    """All ranks of one engine, step by step in one thread."""

    def __init__(self, workers: Sequence[WorkerRuntime], memories: Sequence[FakeMemory]) -> None:
        self._workers = tuple(workers)
        self._memories = tuple(memories)
        self._shapes = memories[0].shapes
        self.by_request = len(self._shapes) > 1 or self._shapes[0].window is not None
        """Whether a failed load is told per request, not per block."""
        self._sent = Rounds(len(workers), "sent")
        self._received = Rounds(len(workers), "received")
        self._failed: set[str] = set()

    @property
    def world_size(self) -> int:
        return len(self._workers)

    def execute(self, batch: Batch, requests: Mapping[str, FakeRequest]) -> None:
        """Run a batch on every rank and collect what they report."""
        for worker in self._workers:
            worker.before_overwrite(batch.plan)
        for memory in self._memories:
            for block in batch.stale:
                memory.poison(block)
        # Loads that the forward pass needs come before it, all others after it.
        if batch.synchronous:
            self._load(batch)
            for request in batch.synchronous:
                self._accept(request)
        for item in batch.scheduled:
            self._forward(item)
        if not batch.synchronous:
            self._load(batch)
        for worker, rank in zip(self._workers, range(self.world_size), strict=True):
            worker.submit_saves(batch.plan, batch.failures_seen.get(rank, 0))
        under_way = [request for request in requests.values() if request.loading_ranks]
        for rank, worker in enumerate(self._workers):
            report = worker.report(batch.plan)
            self._take_report(batch, rank, report, requests)
            if worker.failures:
                batch.failures[rank] = worker.failures
        for rank in range(self.world_size):
            self._check_strays(rank, under_way)

    def check_idle(self) -> None:
        """Nobody is half reported, and no byte changed behind the engine's back."""
        assert not self._sent.open(), f"sent by some ranks only: {self._sent.open()}"
        assert not self._received.open(), f"received by some ranks only: {self._received.open()}"
        for rank in range(self.world_size):
            self._check_strays(rank, ())

    def _load(self, batch: Batch) -> None:
        for worker in self._workers:
            worker.start_loads(batch.plan)

    def _accept(self, request: FakeRequest) -> None:
        for memory in self._memories:
            for group, table in enumerate(request.blocks):
                for row in request.load_rows(self._shapes[group]):
                    memory.accept(group, table[row])

    def _forward(self, item: ScheduledRequest) -> None:
        """Check everything that the tokens attend to, then compute their own cells."""
        truth = item.request.truth
        before = truth.states(0, item.first)
        for memory in self._memories:
            for group, table in enumerate(item.blocks):
                wrong = memory.first_wrong(group, table, before)
                if wrong is not None:
                    item.wrong = item.wrong or f"block {wrong} of its table of group {group}"
        states = truth.states(item.first, item.last)
        if item.wrong:
            states = states ^ _GARBAGE  # every rank sees the others' results
        for memory in self._memories:
            for group, table in enumerate(item.blocks):
                at, size = item.first, self._shapes[group].block_tokens
                while at < item.last:
                    end = min(item.last, (at // size + 1) * size)
                    part = states[at - item.first : end - item.first]
                    memory.write(group, table[at // size], at % size, part)
                    at = end

    def _take_report(
        self, batch: Batch, rank: int, report: StepReport, requests: Mapping[str, FakeRequest]
    ) -> None:
        assert report.failed_receiving <= report.finished_receiving
        synchronous = {request.id for request in batch.synchronous}
        ended = {*report.finished_receiving, *synchronous}
        if self.by_request:
            self._failed |= report.failed_receiving
            invalid: frozenset[int] = frozenset()
        else:
            invalid = report.invalid_blocks
        loaded: set[int] = set()
        for request_id in ended:
            loaded |= self._check_loaded(rank, requests[request_id], report)
        assert invalid <= loaded, "blocks were reported that no load was to fill"
        batch.invalid |= invalid
        batch.sent.update(self._sent.add(rank, report.finished_sending))
        for request_id in self._received.add(rank, report.finished_receiving):
            batch.received.add(request_id)
            if request_id in self._failed:
                self._failed.remove(request_id)
                batch.failed.add(request_id)

    def _check_loaded(self, rank: int, request: FakeRequest, report: StepReport) -> set[int]:
        """A block is right or reported. Returns the blocks of the first group that were to be loaded."""
        assert rank in request.loading_ranks, f"{request.id} has no load on rank {rank}"
        request.loading_ranks.remove(rank)
        memory = self._memories[rank]
        failed = request.id in report.failed_receiving
        for group, (shape, table) in enumerate(zip(self._shapes, request.blocks, strict=True)):
            size = shape.block_tokens
            for row in request.load_rows(shape):
                memory.accept(group, table[row])
                reported = failed if self.by_request else table[row] in report.invalid_blocks
                states = request.truth.states(row * size, (row + 1) * size)
                assert reported or memory.right(group, table[row], states), (
                    f"rank {rank} loaded wrong bytes into block {row} of group {group} of {request.id}"
                )
        return {request.blocks[0][row] for row in request.load_rows(self._shapes[0])}

    def _check_strays(self, rank: int, under_way: Sequence[FakeRequest]) -> None:
        loading: list[set[int]] = [set() for _ in self._shapes]
        for request in under_way:
            for group, table in enumerate(request.blocks):
                loading[group].update(table[row] for row in request.load_rows(self._shapes[group]))
        strays = self._memories[rank].strays(loading)
        assert not strays, f"rank {rank}: somebody wrote into {', '.join(strays)}"
