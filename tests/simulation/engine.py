"""A serving engine without a model, which drives the real scheduler runtime step by step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from kvferry.runtime.requests import LoadState, RequestOptions, RequestState
from kvferry.runtime.scheduler import SchedulerRuntime
from tests.simulation.coverage import Coverage
from tests.simulation.events import EventLoop, require
from tests.simulation.ranks import Job, Rank
from tests.simulation.steps import STEP_SECONDS, Request, Step, StepRunner, Where
from tests.simulation.truth import BLOCK, Numbers, Text, Truth

RUNNING = 4
STEP_TOKENS = 40
PATIENCE_SECONDS = 400.0
"""A request that is older than this has been forgotten by somebody."""


class Engine:
    """One life of one engine, with one runtime and one life of each rank. A step takes several events."""

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
        self._steps = StepRunner(loop, truth, ranks, self.requests, lambda: self.alive, self._step_ended)
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
        where = "rising" if state.rise else "matched" if matched else request.where.value
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
        rising = 0
        while len(self.waiting) > rising and budget > 0 and self._admitted() < RUNNING:
            admission = self._admit(self.waiting[0], budget)
            if admission is None:
                break
            request, count = admission
            if count < 0:
                rising += 1
                self.waiting.rotate(-1)
                continue
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
        step = Step(plan, scheduled, self._cached)
        self._cached = []
        if not (scheduled or plan.loads or plan.sync_loads or plan.saves or plan.flush or plan.ended):
            self._collect(step)
            self._update(step)
            self._asleep = not self.requests
            if not self._asleep:
                self._next_step(0.02)
            return
        self._steps.run(step)

    def _step_ended(self, step: Step) -> None:
        self._collect(step)
        self._update(step)
        self._next_step(self._loop.random.expovariate(1 / STEP_SECONDS))

    # -- results ----------------------------------------------------------------------------------

    def job_ended(self, rank: Rank, job: Job) -> None:
        """A load beside the forward pass ended on a rank."""
        if self.alive:
            self._arrived[rank.number].append(job)

    def _collect(self, step: Step) -> None:
        for number, jobs in self._arrived.items():
            step.loaded.setdefault(number, []).extend(jobs)
            jobs.clear()

    def _update(self, step: Step) -> None:
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

    def _cut_back(self, step: Step) -> None:
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
        """Tokens to run now, none if a load comes first, fewer if it waits for a lower tier; ``None`` ends
        the round."""
        local = external = 0
        if request.computed == 0:
            if self._loop.chance(0.3):
                local = self._loop.random.randrange((len(request.tokens) - 1) // BLOCK + 1) * BLOCK
            found = self._runtime.match(request.id, local, request.preemptions, len(request.tokens))
            if found is None:
                self._coverage.request("waiting: rises")
                request.rose = True
                return request, -1
            external = found
            if external and request.rose:
                self._coverage.request("waiting: rose")
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
        # Those whose blocks are being saved, if there are any: with the others nothing can go wrong.
        saving = [request for request in self.running if self._runtime._requests[request.id].saves]
        request = self._loop.random.choice(saving or self.running)
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
        blocks = list(reversed(request.table))
        if self._loop.chance(0.5):
            # Or a request that comes back at once finds every block where it was, and overwrites it
            # with the same bytes.
            self._loop.random.shuffle(blocks)
        self._free.extend(blocks)
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
