"""A paged serving engine without a model: a scheduler, workers' memory, and a strict eye on both.

It follows the contract of vLLM's scheduler (0.32) towards a KV connector: chunked prefill, a prefix
cache, preemption, asynchronous and synchronous loads, recomputing after failed loads, blocks that stay
until they are reported, and batches that overlap. After every forward pass it knows whether each block
that was read held exactly the right bytes; an answer computed from wrong bytes that nobody reported
is an ``AssertionError``, as is everything that would trip an assertion of the real engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from attrs import define

from kvferry.control.identity import LoRAIdentity
from kvferry.control.keys import KeyChain
from kvferry.runtime.requests import LoadMode, RequestOptions, RequestState
from kvferry.runtime.scheduler import SchedulerRuntime
from kvferry.runtime.worker import WorkerRuntime
from kvferry.testing.fake_memory import FakeMemory, TokenHistory
from kvferry.testing.fake_requests import Batch, FakeRequest, ScheduledRequest, Status
from kvferry.testing.fake_tables import FakeTables, Tables
from kvferry.testing.fake_workers import FakeWorkers

NewChain = Callable[[str, LoRAIdentity | None], KeyChain]


@define(kw_only=True)
class EngineSettings:
    """How the engine behaves.

    ``overlapping``: a batch is scheduled, and run, before the results of the one before it are looked
    at. ``load_mode`` and ``quick_load_tokens`` are the runtime's own settings.
    """

    blocks: int = 64
    """Per KV cache group; all groups share them, and block 0 comes on top."""
    block_tokens: int = 4
    """Of groups without a number of their own."""
    reuse_at_once: bool = False
    """Blocks that were freed last are handed out first."""
    step_tokens: int = 64
    running: int = 4
    prefix_cache: bool = True
    overlapping: bool = False
    load_mode: LoadMode = LoadMode.ASYNC
    quick_load_tokens: int = 0

    def pool_blocks(self, groups: int) -> int:
        """Blocks that the memory of an engine with so many groups must have."""
        return 1 + groups * self.blocks


class FakeEngine:
    """Drives one scheduler runtime and one worker runtime per rank, all opened by the caller.

    ``admit(request)`` scripts failed allocations: False makes the allocation for a waiting request
    fail in this step. Not thread-safe.
    """

    def __init__(
        self,
        settings: EngineSettings,
        scheduler: SchedulerRuntime,
        workers: Sequence[WorkerRuntime],
        memories: Sequence[FakeMemory],
        new_chain: NewChain,
    ) -> None:
        self.settings = settings
        self.scheduler = scheduler
        self.workers = FakeWorkers(workers, memories)
        shapes = memories[0].shapes
        blocks = settings.pool_blocks(len(shapes))
        assert all(memory.blocks >= blocks for memory in memories), "the memory is smaller than the pool"
        self.tables = FakeTables(
            shapes, blocks, prefix_cache=settings.prefix_cache, reuse_at_once=settings.reuse_at_once
        )
        self.admit: Callable[[FakeRequest], bool] = lambda _: True
        self.requests: dict[str, FakeRequest] = {}
        """All that are not forgotten: a finished request stays while its blocks must."""
        self.waiting: deque[FakeRequest] = deque()
        self.loading: list[FakeRequest] = []
        self.running: list[FakeRequest] = []
        self.steps = 0
        self.failures = 0
        """Failed loads that the engine was told of."""
        self._new_chain = new_chain
        self._batches: deque[Batch] = deque()
        self._preempted: list[str] = []
        self._deferred: deque[tuple[int, Tables]] = deque()
        self._lent: list[list[int]] = []
        self._scheduled_batches = 0
        self._processed_batches = 0
        self._failures_seen: dict[int, int] = {}
        self._made = 0
        self.weights = 0

    # -- the user -------------------------------------------------------------------------------

    def add(
        self,
        prompt: Sequence[int],
        *,
        new_tokens: int = 1,
        salt: str = "",
        options: RequestOptions | None = None,
    ) -> FakeRequest:
        """Queue a request."""
        self._made += 1
        request = FakeRequest(
            id=f"request-{self._made}",
            truth=self._history(prompt, salt),
            tokens=list(prompt),
            prompt_tokens=len(prompt),
            total_tokens=len(prompt) + new_tokens,
            salt=salt,
            options=options or RequestOptions(),
            chain=self._new_chain(salt, None),
            blocks=self.tables.empty(),
        )
        most = self.settings.pool_blocks(len(request.blocks)) - 1
        assert self.tables.blocks_for(request.total_tokens) <= most, "it could never run"
        self.requests[request.id] = request
        self.waiting.append(request)
        self.scheduler.add_request(
            RequestState(
                id=request.id,
                tokens=request.tokens,
                prompt_tokens=request.prompt_tokens,
                chain=request.chain,
                salt=request.salt,
                options=request.options,
            )
        )
        return request

    def abort(self, request: FakeRequest) -> None:
        """The client went away. Does nothing to a request that has finished."""
        if request.status is Status.FINISHED:
            return
        still_loading = request.status is Status.LOADING and not request.received
        for queue in (self.waiting, self.loading, self.running):
            if request in queue:
                queue.remove(request)
        self._finish(request, still_loading=still_loading)

    def preempt(self, request: FakeRequest) -> None:
        """Take a running request's blocks, as when the engine's caches are reset."""
        self.running.remove(request)
        self._preempt(request)

    def reset(self) -> None:
        """New weights: nothing that was computed before may be used. All running requests start
        again; the engine must not be loading, which vLLM demands too."""
        assert not self.loading
        while self.running:
            self.preempt(self.running[-1])
        self.forget_prefixes()
        self.weights += 1
        for request in self.waiting:
            request.truth = self._history(request.tokens, request.salt)
        self.scheduler.clear()

    def forget_prefixes(self) -> None:
        """Drop the engine's own prefix cache."""
        self.tables.pool.forget_all()

    def lend(self, count: int) -> None:
        """Another connector loads into up to ``count`` free blocks, for a request of its own.

        :meth:`take_back` ends all of that.
        """
        pool = self.tables.pool
        self._made += 1
        self._lent.append(pool.take(min(count, pool.free)))
        tables = [self._lent[-1], *([] for _ in self.tables.shapes[1:])]
        self.scheduler.allocated(f"stranger-{self._made}", 0, tables)

    def take_back(self) -> None:
        while self._lent:
            self.tables.pool.give_back(self._lent.pop())

    def run(self, most_steps: int = 3000) -> None:
        """Step until every request has ended and every block is back."""
        self.take_back()
        for _ in range(most_steps):
            if not self.requests and not self._batches:
                self.step()  # delivers what was planned at the last request's end
                assert not self.requests
                assert not self._batches
                self.check_idle()
                return
            self.step()
        states = {name: request.status.value for name, request in self.requests.items()}
        raise AssertionError(f"no end after {most_steps} steps: {states}")

    def check_idle(self) -> None:
        """Every block is back where it came from."""
        assert not self._deferred
        assert self.tables.pool.used == 0
        self.workers.check_idle()

    # -- one step -------------------------------------------------------------------------------

    def step(self) -> None:
        """Schedule a batch, run it on all ranks, look at the results that are due."""
        self.steps += 1
        batch = self._schedule()
        self.workers.execute(batch, self.requests)
        self._batches.append(batch)
        while len(self._batches) > (1 if self.settings.overlapping and not batch.empty else 0):
            self._update(self._batches.popleft())

    def _schedule(self) -> Batch:
        budget = self.settings.step_tokens
        scheduled: list[ScheduledRequest] = []
        fresh: dict[str, tuple[list[int], ...] | None] = {}
        preempted = False
        index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            count = min(self._remaining(request), budget)
            if count <= 0:
                index += 1
                continue
            fits, victims = self._make_room(request, request.computed + count)
            preempted = preempted or victims
            if not fits:
                break
            fresh[request.id] = self._extend(request, request.computed + count)
            scheduled.append(self._take(request, count))
            budget -= count
            index += 1
        synchronous: list[FakeRequest] = []
        admitted: set[str] = set()
        if not preempted:
            for request in [*self.loading, *self.waiting]:
                if budget <= 0 or len(self.running) >= self.settings.running:
                    break
                answer = self._try_admit(request, budget)
                if answer is None:
                    break
                count, loads_now = answer
                if count:
                    admitted.add(request.id)
                    scheduled.append(self._take(request, count))
                    budget -= count
                if loads_now:
                    synchronous.append(request)
        return self._batch(scheduled, fresh, admitted, synchronous)

    def _batch(
        self,
        scheduled: list[ScheduledRequest],
        fresh: dict[str, tuple[list[int], ...] | None],
        admitted: set[str],
        synchronous: list[FakeRequest],
    ) -> Batch:
        for request_id in self._preempted:
            self.scheduler.preempted(request_id)
        self._preempted.clear()
        for item in scheduled:
            request = item.request
            new = request.id in admitted
            self.scheduler.scheduled(
                request.id,
                item.last,
                [list(table) for table in request.blocks] if new else fresh[request.id],
                replace_blocks=new,
                known_tokens=len(request.tokens),
                computed_before=item.first,
            )
        plan = self.scheduler.step_plan([item.request.id for item in scheduled])
        if scheduled:
            self._scheduled_batches += 1
        stale = self.tables.pool.take_stale()
        return Batch(plan, dict(self._failures_seen), scheduled, synchronous, stale)

    def _remaining(self, request: FakeRequest) -> int:
        """Tokens that may run now. The last token of the answer is never computed."""
        known = len(request.tokens) + request.expected
        return min(known, request.total_tokens - 1) - request.computed

    def _take(self, request: FakeRequest, count: int) -> ScheduledRequest:
        first, last = request.computed, request.computed + count
        samples = last >= len(request.tokens) + request.expected
        request.computed = last
        request.in_flight += count
        request.expected += samples
        request.last_batch = self._scheduled_batches + 1
        return ScheduledRequest(
            request, first, last, samples, tuple(tuple(table) for table in request.blocks)
        )

    def _try_admit(self, request: FakeRequest, budget: int) -> tuple[int, bool] | None:
        """Tokens to run now and whether a load comes first; None ends the round of admissions."""
        if request.status is Status.LOADING:
            if not request.received:
                return 0, False
            self._loaded(request)
        if request.stale:
            return 0, False
        local_tokens, local = 0, self.tables.empty()
        external = 0
        if request.computed == 0:
            local_tokens, local = self.tables.local_hit(request.truth, len(request.tokens))
            found = self.scheduler.match(request.id, local_tokens, request.preemptions, len(request.tokens))
            if found is None:
                return 0, False
            external = found
            self._check_hit(request, local_tokens, external)
        start = request.computed or local_tokens + external
        later = external > 0 and self.scheduler.loads_beside(request.id)
        count = 0 if later else min(len(request.tokens) - start, budget)
        if not self.admit(request) or not self._allocate(request, local, start, start + count, later):
            return None
        self.scheduler.allocated(request.id, external, request.blocks)
        if request in self.waiting:
            self.waiting.remove(request)
        request.computed = start
        if external:
            request.local_tokens, request.external_tokens = local_tokens, external
            request.loading_ranks = set(range(self.workers.world_size))
            request.hits.append(external)
        if later:
            request.status, request.received, request.load_failed = Status.LOADING, False, False
            self.loading.append(request)
            return 0, False
        assert not external or not self.workers.by_request, "its failure could not be told"
        if request in self.loading:
            self.loading.remove(request)
        request.status = Status.RUNNING
        self.running.append(request)
        self._remember(request, min(start + count, len(request.tokens)))
        return count, external > 0

    def _check_hit(self, request: FakeRequest, local: int, external: int) -> None:
        assert external >= 0
        assert external % self.tables.grain == 0, f"a hit of {external} tokens does not end at a block"
        assert local + external < len(request.tokens), "nothing is left to compute"
        assert not external or request.options.load

    def _history(self, tokens: Sequence[int], salt: str) -> TokenHistory:
        return TokenHistory(tokens, f"{salt} with weights {self.weights}")

    # -- blocks ---------------------------------------------------------------------------------

    def _allocate(self, request: FakeRequest, local: Tables, start: int, tokens: int, later: bool) -> bool:
        """All blocks or none. A load holds its blocks without running, so it is only admitted when
        it, and all that were admitted so before, can run to their end."""
        tables = self.tables
        reserved = 0
        if later:
            reserved = tables.blocks_for(request.total_tokens) - tables.blocks_for(tokens)
            reserved += sum(tables.missing(other.blocks, other.total_tokens) for other in self.loading)
        if any(request.blocks):
            tables.leave_behind(request.blocks, start)
            if tables.pool.free < tables.missing(request.blocks, tokens) + reserved:
                return False
            tables.grow(request.blocks, tokens)
            return True
        admitted = tables.admit(local, start, tokens, reserved)
        if admitted is None:
            return False
        request.blocks = admitted
        return True

    def _make_room(self, request: FakeRequest, tokens: int) -> tuple[bool, bool]:
        """Preempt the youngest until the request can go on: whether it can, whether any had to."""
        preempted = False
        # What a batch in flight may still attend to is kept.
        self.tables.leave_behind(request.blocks, request.computed - request.in_flight)
        while True:
            if self.tables.pool.free >= self.tables.missing(request.blocks, tokens):
                return True, preempted
            victim = self.running[-1]
            if victim.last_batch > self._processed_batches:
                return False, preempted  # its blocks would not be free at once
            self.running.pop()
            self._preempt(victim)
            preempted = True
            if victim is request:
                return False, True

    def _extend(self, request: FakeRequest, tokens: int) -> tuple[list[int], ...] | None:
        new = self.tables.grow(request.blocks, tokens)
        self._remember(request, min(tokens, len(request.tokens)))
        return new

    def _remember(self, request: FakeRequest, tokens: int) -> None:
        self.tables.remember(request.blocks, request.truth, tokens)

    def _preempt(self, request: FakeRequest) -> None:
        request.stale = request.in_flight
        request.computed = request.expected = 0
        request.preemptions += 1
        request.status = Status.PREEMPTED
        self._free(request)
        self.waiting.appendleft(request)
        self._preempted.append(request.id)

    def _free(self, request: FakeRequest) -> None:
        blocks, request.blocks = request.blocks, self.tables.empty()
        if self.settings.overlapping and request.last_batch > self._processed_batches:
            # A batch in flight may still write them, and a load would not wait for it.
            self._deferred.append((self._scheduled_batches, blocks))
            return
        self.tables.give_back(blocks)

    # -- ends -----------------------------------------------------------------------------------

    def _finish(self, request: FakeRequest, *, still_loading: bool) -> None:
        request.status = Status.FINISHED
        self.tables.leave_behind(request.blocks, request.computed - request.in_flight)
        tables = [
            table[: -(-max(0, request.computed) // shape.block_tokens)]
            for shape, table in zip(self.tables.shapes, request.blocks, strict=True)
        ]
        held = self.scheduler.finished(
            request.id, tables, request.computed - request.in_flight, len(request.tokens)
        )
        assert not (held and still_loading), "a second report would come for one request"
        if not held and not still_loading:
            self._forget(request)

    def _forget(self, request: FakeRequest) -> None:
        assert request.status is Status.FINISHED
        self._free(request)
        del self.requests[request.id]

    def _loaded(self, request: FakeRequest) -> None:
        """An asynchronous load ended, well or badly."""
        request.status = Status.PREEMPTED if request.preemptions else Status.WAITING
        if request.computed:
            self._remember(request, request.computed)
        else:
            self._free(request)
        request.received = False

    # -- results --------------------------------------------------------------------------------

    def _update(self, batch: Batch) -> None:
        if not batch.empty:
            self._processed_batches += 1
            while self._deferred and self._deferred[0][0] <= self._processed_batches:
                self.tables.give_back(self._deferred.popleft()[1])
        self._handle_failures(batch)
        for item in batch.scheduled:
            self._deliver(item)
        for request_id in batch.received:
            request = self.requests[request_id]
            if request.status is Status.LOADING:
                request.received = True
            else:
                assert request.status is Status.FINISHED, "a load ended that nobody waits for"
                self._forget(request)
        for request_id in batch.sent:
            request = self.requests[request_id]
            assert request.status is Status.FINISHED, "the end of a request came before its end"
            self._forget(request)
        self._failures_seen.update(batch.failures)

    def _deliver(self, item: ScheduledRequest) -> None:
        request = item.request
        count = item.last - item.first
        request.in_flight -= count
        if request.stale:
            request.stale -= count
            return
        if request.status is Status.FINISHED:
            return
        assert not item.wrong, f"wrong output: {request.id} read wrong bytes in {item.wrong}"
        if not item.samples:
            return
        request.expected -= 1
        request.tokens.append(request.truth.tokens(len(request.tokens) + 1)[-1])
        if len(request.tokens) == request.total_tokens:
            self.running.remove(request)
            self._finish(request, still_loading=False)

    def _handle_failures(self, batch: Batch) -> None:
        """Cut every request that relies on a failed load back to the last good block."""
        for request in self.loading:
            if request.id in batch.failed:
                self.failures += 1
                request.computed = 0
                request.load_failed = True
        if not batch.invalid:
            return
        assert not self.workers.by_request, "block numbers mean nothing with several groups or a window"
        size = self.settings.block_tokens
        for request in [*self.loading, *self.running]:
            reach = -(-max(0, request.computed - request.in_flight) // size)
            bad = [index for index, block in enumerate(request.blocks[0][:reach]) if block in batch.invalid]
            if not bad:
                continue
            self.failures += 1
            request.failures.append(frozenset(bad))
            request.computed = min(bad) * size
            if request.status is Status.LOADING:
                request.load_failed = True
            else:
                request.stale, request.expected = request.in_flight, 0
                self.tables.pool.forget(request.blocks[0][min(bad) :])
