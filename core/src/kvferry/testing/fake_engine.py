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
from kvferry.testing.fake_blocks import FakeBlocks
from kvferry.testing.fake_memory import FakeMemory, TokenHistory
from kvferry.testing.fake_requests import Batch, FakeRequest, ScheduledRequest, Status
from kvferry.testing.fake_workers import FakeWorkers

NewChain = Callable[[str, LoRAIdentity | None], KeyChain]


@define(kw_only=True)
class EngineSettings:
    """How the engine behaves.

    ``overlapping``: a batch is scheduled, and run, before the results of the one before it are looked
    at. ``load_mode`` and ``quick_load_tokens`` are the runtime's own settings.
    """

    blocks: int = 64
    """Per KV cache group."""
    block_tokens: int = 4
    step_tokens: int = 64
    running: int = 4
    prefix_cache: bool = True
    overlapping: bool = False
    load_mode: LoadMode = LoadMode.ASYNC
    quick_load_tokens: int = 0


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
        groups: int,
        new_chain: NewChain,
    ) -> None:
        self.settings = settings
        self.scheduler = scheduler
        self.workers = FakeWorkers(workers, memories, settings.block_tokens)
        self.pools = tuple(
            FakeBlocks(settings.blocks, prefix_cache=settings.prefix_cache) for _ in range(groups)
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
        self._deferred: deque[tuple[int, tuple[list[int], ...]]] = deque()
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
            blocks=self._no_blocks(),
        )
        assert self._blocks_for(request.total_tokens) <= self.settings.blocks, "it could never run"
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
        for pool in self.pools:
            pool.forget_all()
        self.weights += 1
        for request in self.waiting:
            request.truth = self._history(request.tokens, request.salt)
        self.scheduler.clear()

    def run(self, most_steps: int = 3000) -> None:
        """Step until every request has ended and every block is back."""
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
        assert [pool.used for pool in self.pools] == [0] * len(self.pools)
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
            )
        plan = self.scheduler.step_plan([item.request.id for item in scheduled])
        if scheduled:
            self._scheduled_batches += 1
        stale = [pool.take_stale() for pool in self.pools]
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
        size = self.settings.block_tokens
        local: list[tuple[int, ...]] = []
        external = 0
        if request.computed == 0:
            local = self._local_hit(request)
            external = self.scheduler.match(
                request.id, len(local) * size, request.preemptions, len(request.tokens)
            )
            self._check_hit(request, len(local) * size, external)
        start = request.computed or len(local) * size + external
        later = external > 0 and self.scheduler.loads_beside(request.id)
        count = 0 if later else min(len(request.tokens) - start, budget)
        if not self.admit(request) or not self._allocate(request, local, start + count, later):
            return None
        self.scheduler.allocated(request.id, external, request.blocks)
        if request in self.waiting:
            self.waiting.remove(request)
        request.computed = start
        if external:
            request.local_tokens, request.external_tokens = len(local) * size, external
            request.loading_ranks = set(range(self.workers.world_size))
            request.hits.append(external)
        if later:
            request.status, request.received, request.load_failed = Status.LOADING, False, False
            self.loading.append(request)
            return 0, False
        if request in self.loading:
            self.loading.remove(request)
        request.status = Status.RUNNING
        self.running.append(request)
        self._remember(request, min(start + count, len(request.tokens)))
        return count, external > 0

    def _check_hit(self, request: FakeRequest, local: int, external: int) -> None:
        size = self.settings.block_tokens
        assert external >= 0
        assert external % size == 0, f"a hit of {external} tokens does not end at a block"
        assert local + external < len(request.tokens), "nothing is left to compute"
        assert not external or request.options.load

    def _local_hit(self, request: FakeRequest) -> list[tuple[int, ...]]:
        size = self.settings.block_tokens
        found: list[tuple[int, ...]] = []
        for end in range(size, len(request.tokens), size):
            content = request.truth.state(end)
            blocks = [pool.find(content) for pool in self.pools]
            if None in blocks:
                break
            found.append(tuple(block for block in blocks if block is not None))
        return found

    def _history(self, tokens: Sequence[int], salt: str) -> TokenHistory:
        return TokenHistory(tokens, f"{salt} with weights {self.weights}")

    # -- blocks ---------------------------------------------------------------------------------

    def _no_blocks(self) -> tuple[list[int], ...]:
        return tuple([] for _ in self.pools)

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.settings.block_tokens)

    def _allocate(
        self, request: FakeRequest, local: Sequence[tuple[int, ...]], tokens: int, later: bool
    ) -> bool:
        """All blocks or none. A load holds its blocks without running, so it is only admitted when
        it, and all that were admitted so before, can run to their end."""
        held = len(request.blocks[0])
        missing = self._blocks_for(tokens) - held - len(local)
        reserved = 0
        if later:
            missing_to_end = self._blocks_for(request.total_tokens) - self._blocks_for(tokens)
            reserved = missing_to_end + sum(
                self._blocks_for(other.total_tokens) - len(other.blocks[0]) for other in self.loading
            )
        for number, pool in enumerate(self.pools):
            free = pool.free - sum(pool.is_free(row[number]) for row in local)
            if free < missing + reserved:
                return False
        for number, pool in enumerate(self.pools):
            for row in local:
                pool.share(row[number])
                request.blocks[number].append(row[number])
            request.blocks[number].extend(pool.take(missing))
        return True

    def _make_room(self, request: FakeRequest, tokens: int) -> tuple[bool, bool]:
        """Preempt the youngest until the request can go on: whether it can, whether any had to."""
        preempted = False
        while True:
            missing = self._blocks_for(tokens) - len(request.blocks[0])
            if all(pool.free >= missing for pool in self.pools):
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
        missing = self._blocks_for(tokens) - len(request.blocks[0])
        new = tuple(pool.take(missing) for pool in self.pools) if missing > 0 else None
        for table, more in zip(request.blocks, new or (), strict=False):
            table.extend(more)
        self._remember(request, min(tokens, len(request.tokens)))
        return new

    def _remember(self, request: FakeRequest, tokens: int) -> None:
        size = self.settings.block_tokens
        for index in range(tokens // size):
            content = request.truth.state((index + 1) * size)
            for pool, table in zip(self.pools, request.blocks, strict=True):
                pool.remember(table[index], content)

    def _preempt(self, request: FakeRequest) -> None:
        request.stale = request.in_flight
        request.computed = request.expected = 0
        request.preemptions += 1
        request.status = Status.PREEMPTED
        self._free(request)
        self.waiting.appendleft(request)
        self._preempted.append(request.id)

    def _free(self, request: FakeRequest) -> None:
        blocks, request.blocks = request.blocks, self._no_blocks()
        if self.settings.overlapping and request.last_batch > self._processed_batches:
            # A batch in flight may still write them, and a load would not wait for it.
            self._deferred.append((self._scheduled_batches, blocks))
            return
        self._return(blocks)

    def _return(self, blocks: tuple[list[int], ...]) -> None:
        for pool, table in zip(self.pools, blocks, strict=True):
            pool.give_back(table)

    # -- ends -----------------------------------------------------------------------------------

    def _finish(self, request: FakeRequest, *, still_loading: bool) -> None:
        request.status = Status.FINISHED
        covered = self._blocks_for(max(0, request.computed))
        tables = [table[:covered] for table in request.blocks]
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
                self._return(self._deferred.popleft()[1])
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
        assert item.wrong is None, (
            f"wrong output: {request.id} read wrong bytes in block {item.wrong} of its table"
        )
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
        assert len(self.pools) == 1, "block numbers mean nothing with several groups"
        for request in [*self.loading, *self.running]:
            reach = self._blocks_for(request.computed - request.in_flight)
            bad = [index for index, block in enumerate(request.blocks[0][:reach]) if block in batch.invalid]
            if not bad:
                continue
            self.failures += 1
            request.failures.append(frozenset(bad))
            request.computed = min(bad) * self.settings.block_tokens
            if request.status is Status.LOADING:
                request.load_failed = True
            else:
                request.stale, request.expected = request.in_flight, 0
                self.pools[0].forget(request.blocks[0][min(bad) :])
