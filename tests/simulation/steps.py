"""One step of the engine on all its ranks: loads, a forward pass of all together, saves."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence

from attrs import define, field

from kvferry.data.plans import Direction, StepPlan, Transfer
from tests.simulation.events import EventLoop, require
from tests.simulation.ranks import Job, Rank, rows_of
from tests.simulation.truth import BLOCK, GARBAGE, Text, Truth, stored

STEP_SECONDS = 0.004


class Where(enum.Enum):
    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@define(eq=False)
class Request:
    """One request; its tokens are the beginning of a text. ``table`` are its blocks."""

    id: str
    text: Text
    tokens: list[int]
    prompt: int
    total: int
    deadline: float
    where: Where = Where.WAITING
    computed: int = 0
    table: list[int] = field(factory=list)
    preemptions: int = 0
    loaded_from: int = 0
    loaded_to: int = 0
    loading: set[int] = field(factory=set)
    """Ranks whose load has not ended."""
    failed: bool = False
    rose: bool = False
    """It was told to ask again later."""
    mixed: bool = False
    """It went on while the weights changed: its blocks are its own business, and must not be stored."""
    held: bool = False
    untold: set[int] = field(factory=set)
    """Ranks that have not heard of its end yet; its blocks stay until they have, and saved."""

    @property
    def left(self) -> int:
        return min(len(self.tokens), self.total - 1) - self.computed


@define(eq=False)
class Step:
    plan: StepPlan
    scheduled: list[tuple[Request, int, int]]
    cached: list[tuple[Request, int]]
    """Requests with tokens that the engine had already."""
    ended: int = 0
    invalid: set[int] = field(factory=set)
    sync_failed: set[int] = field(factory=set)
    """Ranks on which a load in front of the forward pass failed."""
    loaded: dict[int, list[Job]] = field(factory=dict)
    saves: dict[int, list[Job]] = field(factory=dict)


class StepRunner:
    """Lets the ranks do what a step asks of them: every rank begins it, all compute together, every rank
    ends it. Copies go on in between. Nothing happens any more once ``alive()`` is false.
    """

    def __init__(
        self,
        loop: EventLoop,
        truth: Truth,
        ranks: Sequence[Rank],
        requests: Mapping[str, Request],
        alive: Callable[[], bool],
        on_end: Callable[[Step], None],
    ) -> None:
        self._loop = loop
        self._truth = truth
        self._ranks = ranks
        self._requests = requests
        self._alive = alive
        self._on_end = on_end

    def run(self, step: Step) -> None:
        jobs = [self._jobs(rank, step.plan) for rank in self._ranks]
        for rank, todo in zip(self._ranks, jobs, strict=True):
            self._soon(lambda rank=rank, todo=todo: self._begin(step, rank, todo), "rank begins step")

    def _soon(self, action: Callable[[], object], kind: str) -> None:
        self._loop.after(self._loop.random.expovariate(1 / STEP_SECONDS), kind, action)

    def _jobs(self, rank: Rank, plan: StepPlan) -> tuple[list[Job], list[Job], list[Job]]:
        """What a rank has to do for a plan; from now on its slots are in use."""
        made = []
        for transfers in (plan.sync_loads, plan.loads, plan.saves):
            made.append([self._job(rank, transfer, transfers is plan.loads) for transfer in transfers])
            for job in made[-1]:
                rank.expect(job)
        return made[0], made[1], made[2]

    def _job(self, rank: Rank, transfer: Transfer, beside: bool) -> Job:
        right: dict[int, int] = {}
        request = self._requests.get(transfer.request_id)
        if transfer.direction is Direction.LOAD and request is not None:
            for index in range(request.loaded_from // BLOCK, request.loaded_to // BLOCK):
                right[request.table[index]] = stored(
                    request.text.blocks[index], rank.number, self._truth.weights
                )
            strangers = set(transfer.groups[0].block_column.tolist()) - set(right)
            require(
                not strangers, "blocks that the engine owns are not written", f"{request.id}: {strangers}"
            )
        rows = rows_of(transfer, lambda block: right.get(block, GARBAGE))
        return Job(
            ("engine", transfer.id),
            transfer.request_id,
            transfer.direction,
            rows,
            checked=bool(right),
            beside=beside,
        )

    def _begin(self, step: Step, rank: Rank, jobs: tuple[list[Job], list[Job], list[Job]]) -> None:
        """Before the forward pass: blocks that will be overwritten, loads that it needs."""
        if not (self._alive() and rank.alive):
            return
        sync_loads, loads, saves = jobs
        rank.flush(step.plan.flush)
        for request, local in step.cached:
            self._fill_local(rank, request, local)
        for job in sync_loads:
            rank.run_now(job)
            if job.failed:
                step.sync_failed.add(rank.number)
            step.loaded.setdefault(rank.number, []).append(job)
        for job in loads:
            rank.submit(job)
        step.saves[rank.number] = saves
        if len(step.saves) == len(self._ranks):
            self._forward(step)
            for other in self._ranks:
                self._soon(lambda other=other: self._end(step, other), "rank ends step")

    def _forward(self, step: Step) -> None:
        """All ranks together, as a real forward pass: one rank's wrong input spoils it for all."""
        bad = {
            row.block
            for jobs in step.loaded.values()
            for job in jobs
            for row in job.rows
            if row.slot in job.failed
        }
        for request, first, last in step.scheduled:
            spoilt = any(block in bad for block in request.table)
            for rank in self._ranks:
                if not spoilt and not request.mixed:
                    self._check_before(request, first, rank)
                for index in range(first // BLOCK, -(-last // BLOCK)):
                    whole = (index + 1) * BLOCK <= last and not spoilt
                    rank.cells[request.table[index]] = (
                        stored(request.text.blocks[index], rank.number, self._truth.weights)
                        if whole
                        else GARBAGE
                    )

    def _check_before(self, request: Request, first: int, rank: Rank) -> None:
        for index in range(first // BLOCK):
            right = stored(request.text.blocks[index], rank.number, self._truth.weights)
            require(
                rank.cells[request.table[index]] == right,
                "answers come from right bytes",
                f"rank {rank.number} read wrong bytes in block {index} of {request.id}",
            )

    def _end(self, step: Step, rank: Rank) -> None:
        """After the forward pass: saves of what it computed, and what the engine must hear."""
        if not (self._alive() and rank.alive):
            return
        for job in step.saves[rank.number]:
            if rank.number in step.sync_failed:
                job.failed |= job.slots  # computed after a load that failed
                job.at = len(job.rows)
            rank.submit(job)
        for request_id in step.plan.ended:
            self._requests[request_id].untold.discard(rank.number)
        step.ended += 1
        if step.ended == len(self._ranks):
            self._on_end(step)

    def _fill_local(self, rank: Rank, request: Request, local: int) -> None:
        """Blocks that the engine's own prefix cache has already."""
        for index in range(local // BLOCK):
            rank.cells[request.table[index]] = stored(
                request.text.blocks[index], rank.number, self._truth.weights
            )
