"""The scheduler side of one engine: decides, once, what every rank copies.

The engine's scheduler thread calls these methods; a service thread applies what workers report. One
lock guards the cache manager, and nothing is decoded, hashed or sent while it is held.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence

from attrs import define, evolve, fields_dict, frozen

from kvferry.api import KVFerryError
from kvferry.control.manager import CacheManager
from kvferry.control.outcomes import ChunkWrite, LeaseOutcome, Stats, WriteOutcome
from kvferry.data.plans import Direction, StepPlan, Transfer, TransferResult
from kvferry.data.wire import Bye, Done, FromWorker, Hello, Ready
from kvferry.runtime.address import MeetingPlace
from kvferry.runtime.fair_lock import FairLock
from kvferry.runtime.requests import LoadState, RequestState
from kvferry.runtime.side_channel import LOST_AFTER_SECONDS, SideChannelServer

logger = logging.getLogger(__name__)

_REFUSED = (WriteOutcome.NO_ROOM, WriteOutcome.NO_PARENT)

NO_SLOT = -1
"""Never a slot: a plan that names it is refused by the worker and reported as failed."""


@frozen(kw_only=True)
class SchedulerStatistics:
    """Totals since start. Tokens of requests, bytes nowhere: bytes are the workers'."""

    queries: int = 0
    query_tokens: int = 0
    hit_tokens: int = 0
    loaded_tokens: int = 0
    failed_loads: int = 0
    saved_tokens: int = 0
    failed_saves: int = 0
    refused_saves: int = 0


@define
class _Worker:
    epoch: int
    slots: int
    ready: int = 0
    heard: float = 0.0


@define
class _InFlight:
    """A transfer that has not been reported by every rank."""

    state: RequestState
    """Of the request as it was then: another one may bear the same id by the time of the result."""
    direction: Direction
    waiting: set[int]
    failed_slots: set[int]
    reason: str = ""
    # of a save
    reservation: int = 0
    written: tuple[tuple[int, int, int, int], ...] = ()
    """Per granted chunk: index in the reservation, slot, chunk index, tokens."""
    # of a load
    lease: int = 0
    tokens: int = 0
    keys: Mapping[int, bytes] = {}
    """Digest per slot."""
    chunks: Mapping[int, int] = {}
    """Chunk index per slot."""


class SchedulerRuntime:
    """One engine's cache as its scheduler sees it.

    Threads: the request methods belong to the scheduler's thread; ``statistics`` may be called from
    any thread. ``world_size`` ranks must report before anything becomes visible. ``clock`` is
    monotonic seconds.
    """

    def __init__(
        self,
        manager: CacheManager,
        place: MeetingPlace,
        *,
        world_size: int,
        fingerprint: str,
        block_tokens: int,
        chunk_tokens: int,
        groups: int,
        synchronous: bool,
        save_generated: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._manager = manager
        self._place = place
        self._world_size = world_size
        self._fingerprint = fingerprint
        self._block = block_tokens
        self._chunk = chunk_tokens
        self._groups = groups
        self._synchronous = synchronous
        self._save_generated = save_generated
        self._clock = clock
        self._lock = FairLock()
        self._server: SideChannelServer | None = None
        self._workers: dict[int, _Worker] = {}
        self._lost: set[int] = set()
        self._gone: set[int] = set()
        self._next_transfer = 1
        self._in_flight: dict[int, _InFlight] = {}
        self._requests: dict[str, RequestState] = {}
        self._stores = 0
        """Grows whenever a match could find more than before."""
        self._totals = dict.fromkeys(fields_dict(SchedulerStatistics), 0)
        self._loads: list[Transfer] = []
        self._saves: list[Transfer] = []
        self._flush: list[str] = []
        self._ended: list[str] = []

    # -- life ---------------------------------------------------------------------------------

    def open(self) -> None:
        """Claim the meeting place and start the service thread. Does not wait for workers."""
        token = self._place.claim()
        server = SideChannelServer(self._place.endpoint, token, self._on_message, self._on_tick)
        try:
            server.open()
        except KVFerryError:
            self._place.release()
            raise
        self._server = server

    def close(self) -> None:
        """End the service thread and give the meeting place up. Idempotent."""
        if self._server is not None:
            self._server.close()
            self._server = None
            self._place.release()

    def workers_ready(self) -> bool:
        """Whether every rank has introduced itself and none is lost."""
        with self._lock:
            return self._complete()

    # -- requests, on the scheduler's thread ----------------------------------------------------

    def add_request(self, state: RequestState) -> None:
        """Begin to follow a request. A second call with the same id changes nothing."""
        self._requests.setdefault(state.id, state)

    def knows(self, request_id: str) -> bool:
        return request_id in self._requests

    def match(self, request_id: str, local_tokens: int, preemptions: int, tokens: int) -> int:
        """How many tokens beyond ``local_tokens`` every rank can restore.

        ``local_tokens`` is what the engine holds already, a whole number of blocks; ``tokens`` the
        request's length, of which at least one is left to compute. What was matched stays leased
        until it is loaded, given back or the request ends. May be called again at any time.
        """
        state = self._requests.get(request_id)
        if state is None or not state.options.load:
            return 0
        if preemptions != state.preemptions:
            state.preemptions = preemptions
            self._give_back(state)
            state.forget_blocks()
        if state.load in (LoadState.LOADING, LoadState.FINISHED):
            # It was loaded since it last lost its blocks, and the engine asks again: the load
            # failed. Asking for the same chunks could fail for ever.
            return 0
        limit = (tokens - 1) // self._block * self._block
        if limit <= local_tokens:
            self._give_back(state)
            return 0
        state.extend_chain(tokens)
        if not self._still_matched(state):
            self._match(state, limit)
        found = state.matched_tokens if state.load is LoadState.MATCHED else 0
        gained = max(0, found - local_tokens)
        if gained == 0:
            self._give_back(state)
        state.local_tokens = local_tokens
        return gained

    def _still_matched(self, state: RequestState) -> bool:
        """Whether an earlier match stands: nothing was stored since, and its lease lives."""
        if state.load is not LoadState.MATCHED:
            return False
        now = self._clock()
        with self._lock:
            if state.matched_version == self._stores and self._complete():
                return self._manager.renew(state.lease, now) is LeaseOutcome.OK
        self._give_back(state)
        return False

    def _match(self, state: RequestState, limit: int) -> None:
        with self._lock:
            if not self._complete():
                return
            if not state.counted:
                state.counted = True
                self._count(queries=1, query_tokens=limit)
            state.matched_version = self._stores
            cursor = self._manager.match_in_slices(
                state.id,
                state.chain.keys,
                lambda index: state.chain.tail_keys(index, self._block),
                limit_tokens=limit,
            )
        more = True
        while more:
            # Slice by slice, so that the service thread is never kept waiting for long.
            with self._lock:
                more = cursor.advance(self._clock())
        match = cursor.match
        if match.lease is not None:
            state.lease = match.lease
            state.matched_slots = match.slots
            state.matched_tokens = match.tokens
            state.load = LoadState.MATCHED

    def allocated(self, request_id: str, external_tokens: int, blocks: Sequence[Sequence[int]]) -> None:
        """The engine gave the request blocks; ``external_tokens`` of them are to be loaded.

        Zero gives the matched chunks back: the engine, or another connector, does without them.
        """
        state = self._requests.get(request_id)
        if state is None:
            return
        if external_tokens == 0:
            self._give_back(state)
            return
        if state.load is not LoadState.MATCHED:
            logger.error("kvferry: a load of %s was not matched before", request_id)
            return
        self._plan_load(state, external_tokens, blocks)

    def _plan_load(self, state: RequestState, external_tokens: int, blocks: Sequence[Sequence[int]]) -> None:
        first = state.local_tokens // self._block
        last = (state.local_tokens + external_tokens) // self._block
        per_chunk = self._chunk // self._block
        rows = range(first, last)
        with self._lock:
            self._count(hit_tokens=external_tokens)
            held = self._manager.begin_load(state.lease)
        slots = state.matched_slots if held is LeaseOutcome.OK else (NO_SLOT,) * len(state.matched_slots)
        transfer = Transfer.of(
            self._next_id(),
            state.id,
            Direction.LOAD,
            [slots[row // per_chunk] for row in rows],
            [row % per_chunk for row in rows],
            [[table[row] for row in rows] for table in blocks],
        )
        chunks = range(first // per_chunk, (last - 1) // per_chunk + 1)
        digests = self._digests(state, chunks)
        with self._lock:
            self._in_flight[transfer.id] = _InFlight(
                state=state,
                direction=Direction.LOAD,
                waiting=set(range(self._world_size)),
                failed_slots=set(),
                lease=state.lease,
                tokens=external_tokens,
                # Without the lease nothing is read, so nothing proves bad.
                keys={slots[chunk]: digests[chunk] for chunk in chunks if slots[chunk] != NO_SLOT},
                chunks={slots[chunk]: chunk for chunk in reversed(chunks)},
            )
        state.load = LoadState.LOADING
        state.lease = 0
        # What was restored needs no saving; a load that fails sets this back.
        state.next_chunk = max(state.next_chunk, (state.local_tokens + external_tokens) // self._chunk)
        self._loads.append(transfer)

    def _digests(self, state: RequestState, chunks: range) -> dict[int, bytes]:
        """Digest under which each of these matched chunks was found."""
        keys = state.chain.keys
        full = state.matched_tokens // self._chunk
        digests = {chunk: keys[chunk] for chunk in chunks if chunk < full}
        for chunk in chunks:
            if chunk >= full:
                held = state.matched_tokens - chunk * self._chunk
                tails = state.chain.tail_keys(chunk, self._block)
                digests[chunk] = next(digest for digest, tokens in tails if tokens == held)
        return digests

    def scheduled(
        self,
        request_id: str,
        computed: int,
        new_blocks: Sequence[Sequence[int]] | None,
        *,
        replace_blocks: bool,
        known_tokens: int,
    ) -> None:
        """This step computes the request's tokens up to ``computed``.

        ``new_blocks`` are appended to the block tables, or replace them. Only tokens whose ids are
        known (``known_tokens``) can be keyed, so drafts and placeholders are never saved.
        """
        state = self._requests.get(request_id)
        if state is None:
            return
        if state.load is LoadState.LOADING:
            state.load = LoadState.FINISHED
        if replace_blocks or not state.blocks:
            state.blocks = tuple([] for _ in range(self._groups))
        if new_blocks is not None:
            for table, more in zip(state.blocks, new_blocks, strict=True):
                table.extend(more)
        state.computed = computed
        if not state.options.store or state.outdated:
            return
        valid = min(computed, known_tokens)
        if not self._save_generated:
            valid = min(valid, state.prompt_tokens)
        tail = valid >= state.prompt_tokens and not state.prompt_saved
        if tail:
            state.prompt_saved = True
            self._plan_saves(state, valid, tail_limit=state.prompt_tokens)
        elif valid // self._chunk > max(state.next_chunk, state.refused_chunks):
            self._plan_saves(state, valid, tail_limit=0)

    def preempted(self, request_id: str) -> None:
        """The engine takes the request's blocks in this step."""
        state = self._requests.get(request_id)
        if state is None:
            return
        if state.saves:
            self._flush.append(request_id)
        if state.load is LoadState.LOADING:
            # It was preempted between two steps and begins again in this one, with a load into other
            # blocks. Its match has forgotten the old ones.
            return
        self._give_back(state)
        state.forget_blocks()

    def finished(
        self, request_id: str, blocks: Sequence[Sequence[int]], computed: int, known_tokens: int
    ) -> bool:
        """The request ended with these blocks. Returns whether they must stay until it is reported.

        Called once per request. After True, every rank reports the request exactly once.
        """
        state = self._requests.pop(request_id, None)
        if state is None:
            return False
        self._give_back(state)
        with self._lock:
            self._manager.release_owner(request_id, keep_writes=True)
        if state.load is LoadState.LOADING:
            # The engine itself keeps the blocks until the load is reported; a second reason to keep
            # them would be a second report.
            return False
        # Less than nothing, when a load failed under a batch that is still in flight.
        valid = max(0, min(computed, known_tokens))
        if not self._save_generated:
            valid = min(valid, state.prompt_tokens)
        if state.options.store and not state.outdated and blocks and all(blocks) and state.blocks:
            state.blocks = tuple(list(table) for table in blocks)
            if state.orphaned:
                # Its beginning was evicted while it ran. Offered once more, the whole of it can be
                # found by the next turn; without that, nothing of it can.
                state.next_chunk = 0
            self._plan_saves(state, valid, tail_limit=valid)
        if state.saves == 0:
            return False
        self._ended.append(request_id)
        return True

    def step_plan(self, *, idle: bool) -> StepPlan:
        """Everything planned since the last call."""
        loads = tuple(self._loads)
        plan = StepPlan(
            sync_loads=loads if self._synchronous else (),
            loads=() if self._synchronous else loads,
            saves=tuple(self._saves),
            flush=tuple(self._flush),
            ended=tuple(self._ended),
            idle=idle,
        )
        self._loads, self._saves, self._flush, self._ended = [], [], [], []
        return plan

    def clear(self) -> None:
        """Forget every chunk, because the engine's weights changed or somebody wants it so.

        Nothing that was stored before is loaded from now on, and nothing that was computed or loaded
        before is stored. A load under way goes on: the engine must not be reset during one.
        """
        with self._lock:
            self._manager.clear()
            self._stores += 1
        for state in self._requests.values():
            self._give_back(state)
            state.outdated = bool(state.blocks) or state.load is LoadState.LOADING

    def forget(self, request_id: str) -> None:
        """Stop following a request, for example because its tokens cannot be keyed."""
        state = self._requests.pop(request_id, None)
        if state is not None:
            self._give_back(state)

    def statistics(self) -> tuple[SchedulerStatistics, Stats]:
        with self._lock:
            return SchedulerStatistics(**self._totals), self._manager.stats()

    # -- saves ----------------------------------------------------------------------------------

    def _plan_saves(self, state: RequestState, valid: int, tail_limit: int) -> None:
        """Offer all chunks up to ``valid`` tokens that were not offered yet, and a tail that ends at
        the last whole block within ``tail_limit``."""
        valid = min(valid, min(len(table) for table in state.blocks) * self._block)
        try:
            state.extend_chain(valid)
        except KVFerryError as error:
            logger.warning("kvferry: request %s is not cached: %s", state.id, error)
            state.options = evolve(state.options, store=False)
            return
        full = min(valid // self._chunk, len(state.chain.keys))
        writes = [self._chunk_write(state, index) for index in range(state.next_chunk, full)]
        tail_tokens = min(valid, tail_limit) - full * self._chunk
        tail_end = full * self._chunk + tail_tokens // self._block * self._block
        tail = None
        if tail_tokens >= self._block and tail_end > state.saved_tail:
            tail = self._tail_write(state, full, tail_tokens // self._block * self._block)
            writes.append(tail)
        if not writes:
            return
        now = self._clock()
        with self._lock:
            if not self._complete():
                return
            reservation = self._manager.reserve(state.id, state.salt, writes, now=now)
            refused = sum(item.outcome in _REFUSED for item in reservation.items)
            self._count(refused_saves=refused)
        granted = []
        for index, (write, item) in enumerate(zip(writes, reservation.items, strict=True)):
            if item.outcome is WriteOutcome.GRANTED:
                granted.append((index, item.slot, write.depth, write.tokens))
            if item.outcome in _REFUSED:
                # Asked again when the next chunk is complete, not at every token.
                state.refused_chunks = full
                state.orphaned |= item.outcome is WriteOutcome.NO_PARENT
                break
            if write is tail:
                state.saved_tail = tail_end
            else:
                state.next_chunk = write.depth + 1
        if reservation.id is not None:
            self._plan_save(state, reservation.id, granted)

    def _chunk_write(self, state: RequestState, index: int) -> ChunkWrite:
        return ChunkWrite(
            digest=state.chain.keys[index],
            parent=state.chain.keys[index - 1] if index else None,
            depth=index,
            tokens=self._chunk,
            aliases=tuple(state.chain.tail_keys(index, self._block)),
        )

    def _tail_write(self, state: RequestState, index: int, tokens: int) -> ChunkWrite:
        tails = [pair for pair in state.chain.tail_keys(index, self._block) if pair[1] <= tokens]
        (digest, held), *aliases = tails
        return ChunkWrite(
            digest=digest,
            parent=state.chain.keys[index - 1] if index else None,
            depth=index,
            tokens=held,
            aliases=tuple(aliases),
        )

    def _plan_save(
        self, state: RequestState, reservation: int, granted: list[tuple[int, int, int, int]]
    ) -> None:
        per_chunk = self._chunk // self._block
        slots: list[int] = []
        positions: list[int] = []
        rows: list[int] = []
        for _, slot, chunk, tokens in granted:
            blocks = tokens // self._block
            slots += [slot] * blocks
            positions += range(blocks)
            rows += range(chunk * per_chunk, chunk * per_chunk + blocks)
        transfer = Transfer.of(
            self._next_id(),
            state.id,
            Direction.SAVE,
            slots,
            positions,
            [[table[row] for row in rows] for table in state.blocks],
        )
        with self._lock:
            # Counted under the lock: results count down on the service thread.
            state.saves += 1
            self._in_flight[transfer.id] = _InFlight(
                state=state,
                direction=Direction.SAVE,
                waiting=set(range(self._world_size)),
                failed_slots=set(),
                reservation=reservation,
                written=tuple(granted),
            )
        self._saves.append(transfer)

    # -- what workers report, on the service thread -----------------------------------------------

    def _on_message(self, message: FromWorker) -> str | None:
        now = self._clock()
        if isinstance(message, Hello):
            return self._on_hello(message, now)
        with self._lock:
            worker = self._workers.get(message.rank)
            if worker is None or worker.epoch != message.epoch:
                return None
            worker.heard = now
            self._lost.discard(message.rank)
            if isinstance(message, Ready):
                worker.ready = message.slots
                self._grow()
            elif isinstance(message, Bye):
                self._gone.add(message.rank)
                if len(self._gone) == self._world_size:
                    self._manager.worker_lost()
        if isinstance(message, Done):
            for result in message.results:
                self._on_result(message.rank, result)
        return None

    def _on_hello(self, hello: Hello, now: float) -> str | None:
        if hello.world_size != self._world_size or not 0 <= hello.rank < self._world_size:
            return f"rank {hello.rank} of {hello.world_size}, the scheduler has {self._world_size}"
        if hello.fingerprint != self._fingerprint:
            return "the worker runs with another configuration or other plugin versions"
        with self._lock:
            known = self._workers.get(hello.rank)
            if known is not None and known.epoch != hello.epoch:
                return "a worker of this rank was here before: restart the engine"
            if known is None:
                self._workers[hello.rank] = _Worker(epoch=hello.epoch, slots=hello.slots, heard=now)
        logger.info("kvferry: rank %d is here with %d slots", hello.rank, hello.slots)
        return None

    def _on_tick(self) -> None:
        now = self._clock()
        with self._lock:
            if now >= self._manager.next_deadline():
                self._manager.expire(now)
            for rank, worker in self._workers.items():
                if now - worker.heard > LOST_AFTER_SECONDS and rank not in self._lost:
                    self._lost.add(rank)
                    logger.warning("kvferry: rank %d is silent; no hits until it answers", rank)

    def _complete(self) -> bool:
        return len(self._workers) == self._world_size and not self._lost and not self._gone

    def _grow(self) -> None:
        if len(self._workers) == self._world_size:
            self._manager.grow(min(worker.ready for worker in self._workers.values()))

    def _on_result(self, rank: int, result: TransferResult) -> None:
        with self._lock:
            flight = self._in_flight.get(result.id)
            if flight is None or rank not in flight.waiting:
                return
            flight.waiting.discard(rank)
            flight.failed_slots.update(result.failed_slots)
            flight.reason = flight.reason or result.reason
            if flight.waiting:
                return
            del self._in_flight[result.id]
            if flight.direction is Direction.SAVE:
                self._save_ended(flight)
            else:
                self._load_ended(flight)
        if flight.failed_slots:
            logger.warning(
                "kvferry: %s of request %s failed for %d chunks: %s",
                flight.direction.value,
                flight.state.id,
                len(flight.failed_slots),
                flight.reason,
            )

    def _save_ended(self, flight: _InFlight) -> None:
        succeeded = [index for index, slot, _, _ in flight.written if slot not in flight.failed_slots]
        self._manager.complete(flight.reservation, succeeded)
        self._stores += 1
        saved = sum(tokens for _, slot, _, tokens in flight.written if slot not in flight.failed_slots)
        self._count(saved_tokens=saved, failed_saves=len(flight.written) - len(succeeded))
        state = flight.state
        state.saves -= 1
        failed = [chunk for _, slot, chunk, _ in flight.written if slot in flight.failed_slots]
        if failed:
            state.next_chunk = min(state.next_chunk, *failed)
            state.saved_tail = min(state.saved_tail, min(failed) * self._chunk)

    def _load_ended(self, flight: _InFlight) -> None:
        self._manager.finish_load(flight.lease)
        failed = [chunk for slot, chunk in flight.chunks.items() if slot in flight.failed_slots]
        if not failed:
            self._count(loaded_tokens=flight.tokens)
            return
        self._count(failed_loads=1)
        keys = [flight.keys[slot] for slot in flight.failed_slots if slot in flight.keys]
        self._manager.drop(keys)
        # Whoever matched these chunks, and has not begun to load them, matches again.
        self._stores += 1
        flight.state.next_chunk = min(flight.state.next_chunk, *failed)

    # -- small helpers --------------------------------------------------------------------------

    def _give_back(self, state: RequestState) -> None:
        if state.load is not LoadState.MATCHED:
            return
        with self._lock:
            self._manager.release(state.lease)
        state.lease = 0
        state.load = LoadState.NONE
        state.matched_slots = ()
        state.matched_tokens = 0

    def _next_id(self) -> int:
        self._next_transfer += 1
        return self._next_transfer - 1

    def _count(self, **added: int) -> None:
        """Add to the totals. Under the lock, because both threads count."""
        for name, more in added.items():
            self._totals[name] += more
