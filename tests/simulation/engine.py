"""A serving engine without a model, which drives the real scheduler runtime step by step."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Sequence

from attrs import define, field

from kvferry.data.plans import Direction, StepPlan, Transfer
from kvferry.runtime.requests import LoadState, RequestOptions, RequestState
from kvferry.runtime.scheduler import SchedulerRuntime
from tests.simulation.coverage import Coverage
from tests.simulation.events import EventLoop, require
from tests.simulation.ranks import Job, Rank, rows_of
from tests.simulation.truth import BLOCK, GARBAGE, Numbers, Text, Truth, stored

RUNNING = 4
STEP_TOKENS = 40
STEP_SECONDS = 0.004
PATIENCE_SECONDS = 400.0
"""A request that is older than this has been forgotten by somebody."""


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
    mixed: bool = False
    """It went on while the weights changed: its blocks are its own business, and must not be stored."""
    held: bool = False
    untold: set[int] = field(factory=set)
    """Ranks that have not heard of its end yet; its blocks stay until they have, and saved."""

    @property
    def left(self) -> int:
        return min(len(self.tokens), self.total - 1) - self.computed


@define(eq=False)
class _Step:
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


class Engine:
    """One life of one engine, with one runtime and one life of each rank.

    A step takes several events: every rank begins it, all compute together, every rank ends it. Copies go
    on in between.
    """

    def __init__(
        self,
        loop: EventLoop,
        coverage: Coverage,
        truth: Truth,
        runtime: SchedulerRuntime,
        ranks: Sequence[Rank],
        blocks: int,
        numbers: Numbers,
    ) -> None:
        self.alive = True
        self.requests: dict[str, Request] = {}
        self.waiting: deque[Request] = deque()
        self.loading: list[Request] = []
        self.running: list[Request] = []
        self.most_waiting = 6
        self.hits = 0
        self._loop = loop
        self._coverage = coverage
        self._truth = truth
        self._runtime = runtime
        self._ranks = ranks
        self._blocks = blocks
        self._free = list(range(1, blocks))  # block 0 is never handed out by a real engine either
        self._numbers = numbers
        self._preempted: list[str] = []
        self._arrived: dict[int, list[Job]] = {rank.number: [] for rank in ranks}
        self._weights_due = False
        self._orders: deque[Callable[[], None]] = deque()
        """What clients and the engine itself want to happen before the next step."""
        self._used_ids: deque[str] = deque(maxlen=5)
        self._asleep = False
        self._cached: list[tuple[Request, int]] = []
        self._drought = 0
        """Steps for which no request gets blocks."""

    # -- clients ----------------------------------------------------------------------------------

    def arrive(self, text: Text, prompt: int, total: int, options: RequestOptions) -> None:
        """A client asks."""
        name = f"request-{self._numbers.next()}"
        if self._used_ids and self._loop.chance(0.05):
            name = self._used_ids.popleft()  # while results of its last bearer may be on their way
        request = Request(
            name,
            text,
            list(text.tokens[:prompt]),
            prompt,
            total,
            self._loop.now + PATIENCE_SECONDS,
        )
        self.requests[request.id] = request
        self.waiting.append(request)
        if self._asleep:
            self._asleep = False
            self._next_step(0.001)
        self._runtime.add_request(
            RequestState(
                id=request.id,
                tokens=request.tokens,
                prompt_tokens=prompt,
                chain=self._truth.new_chain(text.identity),
                salt=text.identity.salt,
                options=options,
            )
        )

    def abort_one(self) -> None:
        """A client goes away, at any moment of its request's life."""
        self._loop.fault("client vanished")
        self._orders.append(self._abort_one)

    def abort_all(self) -> None:
        """The engine is asked to end."""
        for request in self._unfinished():
            self._orders.append(lambda request=request: self._abort(request))

    def _unfinished(self) -> list[Request]:
        return [request for request in self.requests.values() if request.where is not Where.FINISHED]

    def _abort_one(self) -> None:
        if alive := self._unfinished():
            self._abort(self._loop.random.choice(alive))

    def _abort(self, request: Request) -> None:
        if request.where is Where.FINISHED:
            return
        state = self._runtime._requests[request.id]
        matched = state.load is LoadState.MATCHED
        where = "matched" if matched else request.where.value
        self._coverage.request(f"{where}: aborted")
        still_loading = request.where is Where.LOADING
        for queue in (self.waiting, self.loading, self.running):
            if request in queue:
                queue.remove(request)
        self._finish(request, still_loading)

    def reset_soon(self) -> None:
        """New weights, as soon as nothing is being loaded: a real engine refuses it before."""
        self._weights_due = True

    def die(self) -> None:
        """All requests end with an error."""
        self.alive = False
        for request in self.requests.values():
            if request.where is not Where.FINISHED:
                where = "running" if request.where is Where.RUNNING else "waiting"
                self._coverage.request(f"{where}: engine died")

    # -- a step -----------------------------------------------------------------------------------

    def start(self) -> None:
        self._next_step(0.001)

    def _next_step(self, seconds: float) -> None:
        self._loop.after(seconds, "step", self._schedule)

    def _schedule(self) -> None:
        if not self.alive:
            return
        for request in self.requests.values():
            late = self._loop.now > request.deadline
            require(not late, "no request waits for ever", f"{request.id} is {request.where.value}")
        while self._orders:
            self._orders.popleft()()
        if self._weights_due and not self.loading and not any(r.computed for r in self.waiting):
            self._reset()
        scheduled: list[tuple[Request, int, int]] = []
        fresh: dict[str, list[int] | None] = {}
        budget = STEP_TOKENS
        for request in list(self.running):
            if request not in self.running or budget <= 0:
                continue
            count = min(request.left, budget, self._loop.random.randrange(1, 30))
            if count <= 0 or not self._make_room(request, request.computed + count, scheduled):
                continue
            fresh[request.id] = self._extend(request, request.computed + count)
            scheduled.append((request, request.computed, request.computed + count))
            budget -= count
        scheduled = [item for item in scheduled if item[0] in self.running]
        admitted: set[str] = set()
        while self.waiting and budget > 0 and self._admitted() < RUNNING:
            admission = self._admit(self.waiting[0], budget)
            if admission is None:
                break
            request, count = admission
            if count:
                admitted.add(request.id)
                scheduled.append((request, request.computed, request.computed + count))
                budget -= count
        self._tell(scheduled, fresh, admitted)

    def _tell(
        self,
        scheduled: list[tuple[Request, int, int]],
        fresh: dict[str, list[int] | None],
        admitted: set[str],
    ) -> None:
        for request_id in self._preempted:
            self._runtime.preempted(request_id)
        self._preempted.clear()
        for request, _, last in scheduled:
            new = list(request.table) if request.id in admitted else fresh.get(request.id)
            self._runtime.scheduled(
                request.id,
                last,
                None if new is None else [new],
                replace_blocks=request.id in admitted,
                known_tokens=len(request.tokens),
            )
            request.computed = last
        plan = self._runtime.step_plan([request.id for request, _, _ in scheduled])
        step = _Step(plan, scheduled, self._cached)
        self._cached = []
        if not (scheduled or plan.loads or plan.sync_loads or plan.saves or plan.flush or plan.ended):
            self._collect(step)
            self._update(step)
            self._asleep = not self.requests
            if not self._asleep:
                self._next_step(0.02)
            return
        jobs = [self._jobs(rank, plan) for rank in self._ranks]
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
        request = self.requests.get(transfer.request_id)
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

    def _begin(self, step: _Step, rank: Rank, jobs: tuple[list[Job], list[Job], list[Job]]) -> None:
        """Before the forward pass: blocks that will be overwritten, loads that it needs."""
        if not (self.alive and rank.alive):
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

    def _forward(self, step: _Step) -> None:
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

    def _end(self, step: _Step, rank: Rank) -> None:
        """After the forward pass: saves of what it computed, and what the engine must hear."""
        if not (self.alive and rank.alive):
            return
        for job in step.saves[rank.number]:
            if rank.number in step.sync_failed:
                job.failed |= job.slots  # computed after a load that failed
                job.at = len(job.rows)
            rank.submit(job)
        for request_id in step.plan.ended:
            self.requests[request_id].untold.discard(rank.number)
        step.ended += 1
        if step.ended == len(self._ranks):
            self._collect(step)
            self._update(step)
            self._next_step(self._loop.random.expovariate(1 / STEP_SECONDS))

    # -- results ----------------------------------------------------------------------------------

    def job_ended(self, rank: Rank, job: Job) -> None:
        """A load beside the forward pass ended on a rank."""
        if self.alive:
            self._arrived[rank.number].append(job)

    def _collect(self, step: _Step) -> None:
        for number, jobs in self._arrived.items():
            step.loaded.setdefault(number, []).extend(jobs)
            jobs.clear()

    def _update(self, step: _Step) -> None:
        for number, jobs in step.loaded.items():
            for job in jobs:
                step.invalid |= {row.block for row in job.rows if row.slot in job.failed}
                request = self.requests[job.request_id]
                request.loading.discard(number)
        self._cut_back(step)
        for request, first, last in step.scheduled:
            if request.where is Where.RUNNING and request.computed == last > first:
                self._sample(request)
        for request in list(self.loading):
            if not request.loading:
                self._loaded(request)
        for request in list(self.requests.values()):
            self._let_go(request)

    def _cut_back(self, step: _Step) -> None:
        """Requests that rely on a failed load go back to the last good block."""
        if not step.invalid:
            return
        for request in [*self.loading, *self.running]:
            reach = request.loaded_to if request.where is Where.LOADING else request.computed
            bad = [
                index
                for index, block in enumerate(request.table[: -(-reach // BLOCK)])
                if block in step.invalid
            ]
            if bad:
                request.failed = True
                request.loaded_to = min(request.loaded_to, min(bad) * BLOCK)
                if request.where is Where.RUNNING:
                    self._coverage.request("loading: failed")
                    request.computed = min(bad) * BLOCK

    def _sample(self, request: Request) -> None:
        if request.computed < len(request.tokens):
            return
        request.tokens.append(request.text.tokens[len(request.tokens)])
        if len(request.tokens) == request.total:
            self._coverage.request("running: finished")
            self.running.remove(request)
            self._finish(request, still_loading=False)

    def _loaded(self, request: Request) -> None:
        self.loading.remove(request)
        self._coverage.request("loading: failed" if request.failed else "loading: loaded")
        request.where = Where.PREEMPTED if request.preemptions else Where.WAITING
        request.computed = request.loaded_to
        if not request.computed:
            self._give_back(request)
        self.waiting.appendleft(request)

    def _let_go(self, request: Request) -> None:
        """A finished request's blocks return when nothing of it is under way any more."""
        if request.where is not Where.FINISHED or request.loading or request.untold:
            return
        if request.held and any(rank.pending_saves(request.id) for rank in self._ranks):
            return
        self._forget(request)

    def _forget(self, request: Request) -> None:
        self._give_back(request)
        del self.requests[request.id]
        self._used_ids.append(request.id)

    # -- admission and blocks -----------------------------------------------------------------------

    def _admitted(self) -> int:
        """Requests that hold blocks, apart from the one that is next."""
        loaded = sum(bool(request.table) for request in list(self.waiting)[1:])
        return len(self.running) + len(self.loading) + loaded

    def _admit(self, request: Request, budget: int) -> tuple[Request, int] | None:
        """Tokens to run now, none if a load comes first; ``None`` ends the round."""
        local = external = 0
        if request.computed == 0:
            if self._loop.chance(0.3):
                local = self._loop.random.randrange((len(request.tokens) - 1) // BLOCK + 1) * BLOCK
            external = self._runtime.match(request.id, local, request.preemptions, len(request.tokens))
            require(external >= 0 and external % BLOCK == 0, "a hit ends at a block", str(external))
            require(local + external < len(request.tokens), "a hit leaves a token to compute", request.id)
        start = request.computed or local + external
        later = external > 0 and self._runtime.loads_beside(request.id)
        count = 0 if later else min(len(request.tokens) - start, budget)
        if self._drought or self._loop.chance(0.08):
            self._loop.fault("allocation failed")
            self._drought = (self._drought or self._loop.random.randrange(1, 8)) - 1
            return None
        end = request.total if later else start + count
        missing = -(-end // BLOCK) - len(request.table)
        if missing > len(self._free):
            return None
        if external and self._loop.chance(0.05):
            self._loop.fault("load declined")
            external, later, start = 0, False, local
            count = min(len(request.tokens) - start, budget)
        self._take(request, -(-(start + count) // BLOCK))
        self._cached.append((request, local))
        request.loaded_from, request.loaded_to = local, local + external
        request.failed = False
        self._runtime.allocated(request.id, external, [list(request.table)])
        self.waiting.popleft()
        if external:
            self.hits += 1
        if later:
            request.where = Where.LOADING
            request.loading = {rank.number for rank in self._ranks}
            self.loading.append(request)
            return request, 0
        request.computed = start
        request.where = Where.RUNNING
        self.running.append(request)
        return request, count

    def _fill_local(self, rank: Rank, request: Request, local: int) -> None:
        """Blocks that the engine's own prefix cache has already."""
        for index in range(local // BLOCK):
            rank.cells[request.table[index]] = stored(
                request.text.blocks[index], rank.number, self._truth.weights
            )

    def _take(self, request: Request, blocks: int) -> None:
        while len(request.table) < blocks:
            request.table.append(self._free.pop())

    def _extend(self, request: Request, tokens: int) -> list[int] | None:
        held = len(request.table)
        self._take(request, -(-tokens // BLOCK))
        return request.table[held:] or None

    def _make_room(self, request: Request, tokens: int, scheduled: list[tuple[Request, int, int]]) -> bool:
        while -(-tokens // BLOCK) - len(request.table) > len(self._free):
            victim = self.running[-1]
            scheduled[:] = [item for item in scheduled if item[0] is not victim]
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def preempt_one(self) -> None:
        """The engine takes a request's blocks for reasons of its own."""
        self._loop.fault("preempted")
        self._orders.append(self._preempt_one)

    def _preempt_one(self) -> None:
        if not self.running:
            return
        request = self._loop.random.choice(self.running)
        self._preempt(request)
        if self._loop.chance(0.2):
            self._orders.append(lambda: self._abort(request))

    def _preempt(self, request: Request) -> None:
        self._coverage.request("running: preempted")
        self.running.remove(request)
        request.computed = 0
        request.mixed = False
        request.preemptions += 1
        request.where = Where.PREEMPTED
        self._give_back(request)
        self.waiting.appendleft(request)
        self._preempted.append(request.id)

    def _give_back(self, request: Request) -> None:
        self._free.extend(reversed(request.table))
        request.table = []

    def _finish(self, request: Request, still_loading: bool) -> None:
        request.where = Where.FINISHED
        covered = -(-request.computed // BLOCK)
        held = self._runtime.finished(
            request.id, [request.table[:covered]], request.computed, len(request.tokens)
        )
        require(not (held and still_loading), "an end is reported once", request.id)
        request.held = held
        if held:
            request.untold = {rank.number for rank in self._ranks}
        elif not still_loading:
            self._forget(request)

    def _reset(self) -> None:
        self._weights_due = False
        keep = self._loop.chance(0.5)
        for request in self.running:
            request.mixed = True
        while self.running and not keep:
            self._preempt(self.running[-1])
        self._truth.weights += 1
        self._runtime.clear()

    @property
    def idle(self) -> bool:
        return not self.requests

    def check_empty(self) -> None:
        """After the last request: every block is back."""
        require(sorted(self._free) == list(range(1, self._blocks)), "all counts return", "blocks were lost")
