"""The scheduler side of one engine: decides, once, what every rank copies.

The engine's scheduler thread calls these methods; a service thread applies what workers report. One
lock guards the cache manager, and nothing is decoded, hashed or sent while it is held.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Collection, Sequence

from attrs import evolve, fields_dict, frozen

from kvferry.api import KVFerryError
from kvferry.control.lower import LowerTierReport
from kvferry.control.manager import CacheManager
from kvferry.control.outcomes import ChunkWrite, LeaseOutcome, Stats, WriteOutcome
from kvferry.control.seeking import Wanted
from kvferry.data.plans import StepPlan, Transfer, TransferResult
from kvferry.data.wire import (
    Bye,
    ChannelClosed,
    ChannelOpened,
    Done,
    FromWorker,
    Hello,
    OrderDone,
    Ready,
    TierClosed,
    TierContent,
    WorkerOrder,
)
from kvferry.runtime.address import MeetingPlace
from kvferry.runtime.admin import AdminDesk, TierCard
from kvferry.runtime.events import CacheEvent
from kvferry.runtime.fair_lock import FairLock
from kvferry.runtime.grain import Grain, GroupShape
from kvferry.runtime.in_flight import (
    Ended,
    Granted,
    InFlightSave,
    InFlightTransfers,
)
from kvferry.runtime.keeping import Keeper
from kvferry.runtime.loads import Loads
from kvferry.runtime.lower_tiers import LowerSetup, LowerTiers
from kvferry.runtime.offers import offers, save, window_blocks
from kvferry.runtime.requests import LoadMode, LoadState, RequestState
from kvferry.runtime.roster import WorkerRoster
from kvferry.runtime.sharing import Sharing, SharingSetup
from kvferry.runtime.sharing_statistics import SharingStatistics
from kvferry.runtime.side_channel import SideChannelServer
from kvferry.runtime.waits import LowerStatistics, Waits
from kvferry.runtime.windows import StoredWindows, WindowReads, first_kept, missing_of

logger = logging.getLogger(__name__)

_REFUSED = (WriteOutcome.NO_ROOM, WriteOutcome.NO_PARENT, WriteOutcome.OVER_QUOTA)
_NOT_FOUND_ROOM = (WriteOutcome.NO_ROOM, WriteOutcome.NO_PARENT)

CHUNKS_PER_SAVE = 4
"""Chunks reserved under one hold of the lock, and written by one transfer: reserving one with an
eviction takes about 20 microseconds."""
EXPIRED_AT_ONCE = 12
"""Chunks whose time to live ended that are removed under one hold of the lock: below 100 microseconds
in the median, as ``tests/bench/holds.py`` measures."""


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


class SchedulerRuntime:
    """One engine's cache as its scheduler sees it.

    Threads: the request methods belong to the scheduler's thread; ``statistics`` may be called from
    any thread. ``world_size`` ranks must report before anything becomes visible. With
    ``LoadMode.AUTO``, loads of at most ``quick_load_tokens`` tokens may run in front of a forward
    pass. ``clock`` is monotonic seconds, ``wall_clock`` seconds since 1970. ``tier`` and ``card`` are what
    operators are told; ``events`` says that :meth:`take_events` will be called every step. ``lower``
    describes the tiers below the manager's; with ``sharing``, which needs ``lower`` to say how to borrow,
    other instances read from this one, and it from them.
    """

    def __init__(
        self,
        manager: CacheManager,
        place: MeetingPlace,
        *,
        world_size: int,
        fingerprint: str,
        chunk_tokens: int,
        groups: Sequence[GroupShape],
        load_mode: LoadMode,
        save_generated: bool,
        quick_load_tokens: int = 0,
        clock: Callable[[], float] = time.monotonic,
        tier: TierCard | None = None,
        card: str = "",
        events: bool = False,
        lower: LowerSetup | None = None,
        sharing: SharingSetup | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._manager = manager
        self._place = place
        self._grain = Grain.of(chunk_tokens, groups)
        self._windows = StoredWindows(self._grain)
        self._reads = WindowReads()
        self._load_mode = load_mode
        self._quick_load_tokens = quick_load_tokens
        self._save_generated = save_generated
        self._clock = clock
        self._card = card
        self._lock = FairLock()
        self._keeper = Keeper(manager, self._lock, clock, events)
        next_order = itertools.count(1).__next__
        self._lower: LowerTiers | None = None
        if lower is not None:
            self._lower = LowerTiers(
                lower.build(manager, chunk_tokens, self._windows, next_order),
                self._lock,
                lower.identity,
                world_size=world_size,
                post=self._post,
                wake=self._wake,
                on_change=self._changed,
                clock=clock,
                wall_clock=wall_clock,
            )
        self._sharing: Sharing | None = None
        if sharing is not None:
            assert self._lower is not None, "sharing needs a hierarchy"
            assert self._lower.hierarchy.borrowing is not None, "sharing needs to know how to borrow"
            self._sharing = Sharing(
                sharing,
                manager,
                self._lower.hierarchy.borrowing,
                self._lock,
                world_size=world_size,
                post=self._post,
                wake=self._wake,
                next_order=next_order,
                clock=clock,
            )
        self._lower_opened = False
        self._waits = Waits()
        self._waiting: set[str] = set()
        """Requests that wait for a lower tier."""
        self._desk = AdminDesk(
            manager,
            self._lock,
            tier or TierCard(),
            statistics=self._numbers,
            on_change=self._changed,
            clock=clock,
            lower=self._lower,
            lower_statistics=self.lower_statistics,
            sharing_statistics=self.sharing_statistics,
        )
        self._server: SideChannelServer | None = None
        self._roster = WorkerRoster(world_size, fingerprint)
        self._in_flight = InFlightTransfers(world_size)
        self._requests: dict[str, RequestState] = {}
        self._stores = 0
        """Grows whenever a match could find more than before."""
        self._totals = dict.fromkeys(fields_dict(SchedulerStatistics), 0)
        self._running: set[str] = set()
        """Requests of the last step that have not ended since."""
        self._loads = Loads(
            manager,
            self._lock,
            self._grain,
            self._in_flight,
            self._waits,
            None if self._lower is None else self._lower.hierarchy,
            keep=sharing is None or sharing.keep,
            count=self._count,
            on_change=self._changed,
            clock=clock,
        )
        self._saves: list[Transfer] = []
        self._flush: list[str] = []
        self._ended: list[str] = []

    # -- life ---------------------------------------------------------------------------------

    def open(self) -> None:
        """Claim the meeting place and start the service thread. Does not wait for workers."""
        token = self._place.claim(self._card)
        server = SideChannelServer(
            self._place.endpoint, token, self.deliver, self.run_timers, self._desk, self._clock
        )
        try:
            server.open()
        except KVFerryError:
            self._place.release()
            raise
        self._server = server

    def close(self) -> None:
        """End the service thread and give the meeting place up. Idempotent."""
        if self._sharing is not None:
            self._sharing.close()
        if self._server is not None:
            self._server.close()
            self._server = None
            self._place.release()

    def workers_ready(self) -> bool:
        """Whether every rank has introduced itself and none is lost."""
        with self._lock:
            return self._roster.complete

    # -- requests, on the scheduler's thread ----------------------------------------------------

    def add_request(self, state: RequestState) -> None:
        """Begin to follow a request. A second call with the same id changes nothing.

        What lower tiers have of it begins to come up at once, before the engine asks.
        """
        if state.id in self._requests:
            return
        self._requests[state.id] = state
        if self._lower is not None and state.options.load:
            # A request without a key is told of when the engine asks.
            with contextlib.suppress(KVFerryError):
                self._answer(state, 0, state.prompt_tokens)

    def knows(self, request_id: str) -> bool:
        return request_id in self._requests

    def match(self, request_id: str, local_tokens: int, preemptions: int, tokens: int) -> int | None:
        """How many tokens beyond ``local_tokens`` every rank can restore; ``None`` while chunks come up
        from a lower tier: ask again later.

        ``local_tokens`` is what the engine holds already, a whole number of blocks; ``tokens`` the
        request's length, of which at least one is left to compute. What was matched stays leased
        until it is loaded, given back or the request ends. May be called again at any time.
        """
        state = self._requests.get(request_id)
        if state is None or not state.options.load:
            return 0
        if not state.asked:
            state.asked = True
            # Time that it spent in the engine's queue does not count.
            state.sought_from = -1
            state.wait_until = self._clock() + state.wait_seconds if state.rise else 0.0
        if preemptions != state.preemptions:
            state.preemptions = preemptions
            self._loads.give_back(state)
            self._loads.drop_loan(state)
            state.forget_blocks()
        if state.load in (LoadState.LOADING, LoadState.FINISHED):
            # It was loaded since it last lost its blocks, and the engine asks again: the load
            # failed. Asking for the same chunks could fail for ever.
            return 0
        found = self._answer(state, local_tokens, tokens)
        if self._lower is not None:
            self._waits.told(state, found is None, self._clock())
        return found

    def _answer(self, state: RequestState, local_tokens: int, tokens: int) -> int | None:
        """What :meth:`match` says of a request that may load."""
        limit = (tokens - 1) // self._grain.block * self._grain.block
        if limit <= local_tokens:
            self._stop_waiting(state)
            self._loads.give_back(state)
            self._loads.drop_loan(state)
            return 0
        if state.rise and self._goes_on(state):
            return None
        state.extend_chain(tokens)
        if not self._still_matched(state):
            self._match(state, limit)
        end = 0
        if state.load is LoadState.MATCHED:
            end = self._windows.reach(state.matched_slots, state.matched_tokens, local_tokens)
        end = max(end, self._loads.end_of_loan(state, local_tokens, limit))
        if self._lower is not None and end < limit and self._seek(state, limit, local_tokens):
            return None
        state.hit_tokens = max(0, end - local_tokens)
        if state.hit_tokens == 0:
            self._loads.give_back(state)
            self._loads.drop_loan(state)
        state.local_tokens = local_tokens
        return state.hit_tokens

    def _seek(self, state: RequestState, limit: int, local_tokens: int) -> bool:
        """Whether a lower tier has more of it, which comes up from now on."""
        assert self._lower is not None
        now = self._clock()
        if state.matched_tokens <= state.sought_from or (state.wait_until and now >= state.wait_until):
            return False
        state.sought_from = state.matched_tokens
        wanted = Wanted(
            request=state.id,
            salt=state.salt,
            keys=state.chain.keys,
            tail_keys=lambda index: state.chain.tail_keys(index, self._grain.block),
            limit_tokens=limit,
            held_tokens=state.matched_tokens,
            local_tokens=local_tokens,
            asked=state.asked,
        )
        state.rise, seconds = self._lower.seek(wanted)
        if not state.rise:
            return False
        if not state.wait_until:
            state.wait_seconds = seconds
            state.wait_until = now + seconds
        self._waits.rising(state)
        self._waiting.add(state.id)
        return True

    def _goes_on(self, state: RequestState) -> bool:
        """Whether waiting for the rise may still be of use."""
        assert self._lower is not None
        goes_on = self._lower.goes_on(state.rise)
        if goes_on and self._clock() < state.wait_until:
            return True
        self._stop_waiting(state, late=goes_on)
        return False

    def _stop_waiting(self, state: RequestState, *, late: bool = False) -> None:
        if not state.rise or self._lower is None:
            return
        state.rise = 0
        self._waiting.discard(state.id)
        with self._lock:
            self._lower.leave(state.id, late=late)

    def loads_beside(self, request_id: str) -> bool:
        """Whether what :meth:`match` just found will be loaded beside other requests' forward passes.

        Asked once after every match that found something. A load in front of the forward pass saves
        the engine a step or two, and delays nobody as long as nobody else runs.
        """
        state = self._requests[request_id]
        quick = state.hit_tokens <= self._quick_load_tokens
        alone = not self._running and not self._loads.planned
        state.load_beside = (
            self._load_mode is LoadMode.ASYNC
            or (self._load_mode is LoadMode.AUTO and not (quick and alone))
            or state.loan is not None  # a peer may need its time
        )
        return state.load_beside

    def _still_matched(self, state: RequestState) -> bool:
        """Whether an earlier match stands: nothing was stored since, and its lease lives."""
        if state.load is not LoadState.MATCHED:
            return False
        now = self._clock()
        with self._lock:
            if state.matched_version == self._stores and self._roster.complete:
                return self._manager.renew(state.lease, now) is LeaseOutcome.OK
        self._loads.give_back(state)
        return False

    def _match(self, state: RequestState, limit: int) -> None:
        with self._lock:
            if not self._roster.complete:
                return
            if not state.counted:
                state.counted = True
                self._count(queries=1, query_tokens=limit)
            state.matched_version = self._stores
            cursor = self._manager.match_in_slices(
                state.id,
                state.chain.keys,
                lambda index: state.chain.tail_keys(index, self._grain.block),
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
            self._keeper.matched(state, match.tokens // self._grain.chunk)
            if self._lower is not None:
                self._lower.touch(state.chain.keys[: match.tokens // self._grain.chunk])

    def allocated(self, request_id: str, external_tokens: int, blocks: Sequence[Sequence[int]]) -> None:
        """The engine gave the request blocks; ``external_tokens`` of them are to be loaded.

        Zero gives the matched chunks back: the engine, or another connector, does without them. To be
        told for every request, followed or not: its blocks may have been another's until now.
        """
        self.taken(blocks)
        state = self._requests.get(request_id)
        if state is None:
            return
        if external_tokens == 0:
            self._loads.give_back(state)
            self._loads.drop_loan(state)
            return
        if state.load is not LoadState.MATCHED and state.loan is None:
            logger.error("kvferry: a load of %s was not matched before", request_id)
            return
        self._loads.plan(state, external_tokens, blocks)

    def taken(self, blocks: Sequence[Sequence[int]]) -> None:
        """The engine hands these blocks out, per group, and the coming step may overwrite them.

        With windows this must be told of all blocks before :meth:`step_plan`, those of requests that
        kvferry does not follow included; :meth:`allocated` and :meth:`scheduled` do so themselves.
        """
        if self._grain.windows:
            self._reads.take(blocks)

    def scheduled(
        self,
        request_id: str,
        computed: int,
        new_blocks: Sequence[Sequence[int]] | None,
        *,
        replace_blocks: bool,
        known_tokens: int,
        computed_before: int | None = None,
    ) -> None:
        """This step computes the request's tokens up to ``computed``, from ``computed_before`` on.

        ``new_blocks`` are appended to the block tables, or replace them. Only tokens whose ids are
        known (``known_tokens``) can be keyed, so drafts and placeholders are never saved. Where
        ``computed_before`` is not said, a group with a window is taken to have kept no more than the
        window before ``computed``.
        """
        if new_blocks is not None:
            self.taken(new_blocks)
        state = self._requests.get(request_id)
        if state is None:
            return
        if state.load is LoadState.LOADING:
            state.load = LoadState.FINISHED
        if replace_blocks or not state.blocks:
            state.blocks = tuple([] for _ in self._grain.groups)
            state.settled = 0
        state.settled = max(state.settled, computed if computed_before is None else computed_before)
        if new_blocks is not None:
            for table, more in zip(state.blocks, new_blocks, strict=True):
                table.extend(more)
        if not state.options.store or state.outdated:
            return
        valid = min(computed, known_tokens)
        if not self._save_generated:
            valid = min(valid, state.prompt_tokens)
        tail = valid >= state.prompt_tokens and not state.prompt_saved
        if tail:
            state.prompt_saved = True
            self._plan_saves(state, valid, tail_limit=state.prompt_tokens)
        elif valid // self._grain.chunk > max(state.next_chunk, state.refused_chunks):
            self._plan_saves(state, valid, tail_limit=0)

    def preempted(self, request_id: str) -> None:
        """The engine takes the request's blocks in this step."""
        self._running.discard(request_id)
        state = self._requests.get(request_id)
        if state is None:
            return
        if state.saves:
            self._flush.append(request_id)
        if state.load is LoadState.LOADING:
            # It was preempted between two steps and begins again in this one, with a load into other
            # blocks. Its match has forgotten the old ones.
            return
        self._loads.give_back(state)
        self._loads.drop_loan(state)
        state.forget_blocks()

    def finished(
        self, request_id: str, blocks: Sequence[Sequence[int]], computed: int, known_tokens: int
    ) -> bool:
        """The request ended with these blocks. Returns whether they must stay until it is reported.

        Called once per request. After True, every rank reports the request exactly once.
        """
        self._running.discard(request_id)
        state = self._requests.pop(request_id, None)
        if state is None:
            return False
        self._stop_waiting(state)
        self._waits.end(state, self._clock())
        self._loads.give_back(state)
        self._loads.drop_loan(state)
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
            state.settled = max(state.settled, computed)
            if state.orphaned:
                # Its beginning was evicted while it ran. Offered once more, the whole of it can be
                # found by the next turn; without that, nothing of it can.
                state.next_chunk = 0
            self._plan_saves(state, valid, tail_limit=valid)
        if state.saves == 0:
            return False
        if not any(blocks):
            # It was preempted since the last step: what it saves lies in blocks that are others' by now.
            self._flush.append(request_id)
        self._ended.append(request_id)
        return True

    def step_plan(self, running: Collection[str]) -> StepPlan:
        """Everything planned since the last call. ``running`` are all requests that this step computes
        tokens of, those that kvferry does not follow included."""
        self._running = set(running)
        if self._grain.windows:
            with self._lock:
                overtaken = self._reads.overtaken()
            self._flush += [name for name in overtaken if name not in self._flush]
        loads = self._loads.take()
        plan = StepPlan(
            sync_loads=loads.in_front,
            loads=loads.beside,
            peer_loads=loads.from_peers,
            saves=tuple(self._saves),
            flush=tuple(self._flush),
            ended=tuple(self._ended),
            idle=not running,
            rising=bool(self._waiting),
            seeking=self._lower is not None and self._lower.seeks,
        )
        self._saves, self._flush, self._ended = [], [], []
        return plan

    def clear(self) -> None:
        """Forget every chunk, because the engine's weights changed or somebody wants it so.

        Nothing that was stored before is loaded from now on, and nothing that was computed or loaded
        before is stored. A load under way goes on: the engine must not be reset during one. Lower tiers
        begin anew: what they are given from now on belongs to this process, since nobody else can know
        which weights it was computed with.
        """
        for state in self._requests.values():
            self._stop_waiting(state)
            self._loads.give_back(state)
            self._loads.drop_loan(state)
            state.outdated = bool(state.blocks) or state.load is LoadState.LOADING
        if self._lower is not None:
            # From below first: what is cleared above must not come up again.
            self._lower.clear_begins()
            self._lower.renew()
        if self._sharing is not None:
            self._sharing.retire()
        with self._lock:
            cursor = self._manager.clear_in_slices()
        more = True
        while more:
            with self._lock:
                more = cursor.advance()
                self._changed()
        if self._lower is not None:
            self._lower.clear_ended()

    def forget(self, request_id: str) -> None:
        """Stop following a request, for example because its tokens cannot be keyed."""
        state = self._requests.pop(request_id, None)
        if state is not None:
            self._stop_waiting(state)
            self._waits.end(state, self._clock())
            self._loads.give_back(state)
            self._loads.drop_loan(state)

    def lower_tiers(self) -> tuple[LowerTierReport, ...]:
        """How each tier below the first is. Any thread."""
        return () if self._lower is None else self._lower.reports()

    @property
    def sharing(self) -> Sharing | None:
        """What is shared with other instances, if anything is."""
        return self._sharing

    def lower_at_rest(self) -> bool:
        """Whether nothing moves between tiers, nor is about to. Any thread."""
        return self._lower is None or self._lower.at_rest()

    def lower_statistics(self) -> LowerStatistics | None:
        """The same, and what requests have of them; ``None`` if there is no such tier. Any thread."""
        return None if self._lower is None else self._lower.statistics(self._waits)

    def sharing_statistics(self) -> SharingStatistics | None:
        """What was borrowed from other instances and is lent to them; ``None`` if nothing is shared. Any
        thread."""
        return None if self._sharing is None else self._sharing.statistics(self._waits.borrowed_tokens)

    def statistics(self) -> tuple[SchedulerStatistics, Stats]:
        with self._lock:
            return SchedulerStatistics(**self._totals), self._manager.stats()

    def take_events(self) -> list[CacheEvent]:
        """What became of the tier's content since the last call, in order; nothing unless asked for.

        Full chunks only. A bounded part at a time, so call it every step. On the scheduler's thread.
        """
        return self._keeper.take_events()

    # -- saves ----------------------------------------------------------------------------------

    def _plan_saves(self, state: RequestState, valid: int, tail_limit: int) -> None:
        """Offer what of the first ``valid`` tokens was not offered yet, a few chunks at a time."""
        held = zip(self._grain.groups, state.blocks, strict=True)
        valid = min(valid, min(group.block_tokens * len(table) for group, table in held))
        try:
            state.extend_chain(valid)
            writes = offers(state, valid, tail_limit, self._grain)
            for start in range(0, len(writes), CHUNKS_PER_SAVE):
                if not self._plan_save(state, writes[start : start + CHUNKS_PER_SAVE]):
                    # Asked again when the next chunk is complete, not at every token.
                    state.refused_chunks = valid // self._grain.chunk
                    break
        except KVFerryError as error:
            logger.warning("kvferry: request %s is not cached: %s", state.id, error)
            state.options = evolve(state.options, store=False)

    def _plan_save(self, state: RequestState, writes: Sequence[ChunkWrite]) -> bool:
        """Reserve room and plan the copies; False once something found no room."""
        now = self._clock()
        self._keeper.prepare(state, writes[0].depth, now)
        with self._lock:
            if not self._roster.complete:
                return False
            reservation = self._keeper.reserve(state, writes, now)
            outcomes = [item.outcome for item in reservation.items]
            self._count(refused_saves=sum(outcome in _NOT_FOUND_ROOM for outcome in outcomes))
        self._keeper.reserved(state, writes, reservation)
        if reservation.id is not None:
            granted = tuple(
                self._granted(state, item, answer.slot, write)
                for item, (write, answer) in enumerate(zip(writes, reservation.items, strict=True))
                if answer.outcome is WriteOutcome.GRANTED
            )
            transfer = save(self._in_flight.next_id(), state, granted, self._grain)
            flight = InFlightSave(state=state, reservation=reservation.id, granted=granted)
            with self._lock:
                self._in_flight.add(transfer.id, flight)
                # Counted under the lock: results count down on the service thread.
                state.saves += 1
                if self._grain.windows:
                    self._reads.begin(transfer.id, state.id, window_blocks(transfer, self._grain))
            self._saves.append(transfer)
        for write, outcome in zip(writes, outcomes, strict=True):
            if outcome in _REFUSED:
                state.orphaned |= outcome is WriteOutcome.NO_PARENT
                return False
            if write.tokens == self._grain.chunk:
                state.next_chunk = write.depth + 1
            else:
                state.saved_tail = write.depth * self._grain.chunk + write.tokens
        return True

    def _granted(self, state: RequestState, item: int, slot: int, write: ChunkWrite) -> Granted:
        if not self._grain.windows:
            return Granted(item, slot, write.depth, write.tokens)
        missing = missing_of(write.depth, first_kept(state, self._grain), self._grain)
        self._windows.granted(slot, missing)
        return Granted(item, slot, write.depth, write.tokens, missing)

    # -- what workers report, on the service thread -----------------------------------------------

    def deliver(self, message: FromWorker) -> str | None:
        """Apply a worker's message; for a hello, why it is refused, or None. For whoever hosts the
        service: the side channel's thread after :meth:`open`, otherwise the caller's own loop."""
        now = self._clock()
        if isinstance(message, Hello):
            return self._on_hello(message, now)
        with self._lock:
            if not self._roster.heard(message, now):
                return None
            if isinstance(message, Ready):
                self._roster.ready(message.rank, message.slots)
                self._manager.grow(self._roster.ready_slots)
            elif isinstance(message, Bye):
                self._roster.leave(message.rank)
                if self._roster.all_gone:
                    self._manager.worker_lost()
                    if self._lower is not None:
                        self._lower.workers_lost()
                    if self._sharing is not None:
                        self._sharing.workers_lost()
        if isinstance(message, Done):
            for result in message.results:
                self._on_result(message.rank, result)
        elif self._lower is not None and isinstance(message, TierContent | TierClosed | OrderDone):
            self._lower.on_message(message)
            if self._sharing is not None and isinstance(message, OrderDone):
                self._sharing.on_done(message)
        elif self._sharing is not None and isinstance(message, ChannelOpened | ChannelClosed):
            self._sharing.on_message(message)
        return None

    def _on_hello(self, hello: Hello, now: float) -> str | None:
        with self._lock:
            refusal = self._roster.greet(hello, now)
        if refusal is None:
            logger.info("kvferry: rank %d is here with %d slots", hello.rank, hello.slots)
        return refusal

    def run_timers(self) -> None:
        """End what ran past its deadline, and notice silent workers. Hosted as :meth:`deliver` is."""
        now = self._clock()
        due = True
        while due:
            # Slice by slice, since any number of chunks may end at one time.
            with self._lock:
                due = now >= self._manager.next_deadline()
                if due:
                    self._manager.expire(now, EXPIRED_AT_ONCE)
        with self._lock:
            silent = self._roster.newly_silent(now)
        for rank in silent:
            logger.warning("kvferry: rank %d is silent; no hits until it answers", rank)
        if self._lower is not None:
            if not self._lower_opened and self.workers_ready():
                self._lower_opened = True
                self._lower.open()
                if self._sharing is not None:
                    self._sharing.open()
            self._lower.work()
            if self._sharing is not None:
                self._sharing.work()

    def _on_result(self, rank: int, result: TransferResult) -> None:
        with self._lock:
            ended = self._in_flight.report(rank, result)
            if ended is None:
                return
            if isinstance(ended.flight, InFlightSave):
                self._reads.end(result.id)
                self._save_ended(ended.flight, ended)
            else:
                self._loads.ended(ended.flight, ended)
        if ended.failed_slots:
            logger.warning(
                "kvferry: a %s of request %s failed for %d chunks: %s",
                "save" if isinstance(ended.flight, InFlightSave) else "load",
                ended.flight.state.id,
                len(ended.failed_slots),
                ended.reason,
            )

    def _save_ended(self, flight: InFlightSave, ended: Ended) -> None:
        good = [chunk for chunk in flight.granted if chunk.slot not in ended.failed_slots]
        bad = [chunk.chunk for chunk in flight.granted if chunk.slot in ended.failed_slots]
        self._manager.complete(flight.reservation, [chunk.item for chunk in good])
        self._stores += 1
        self._count(saved_tokens=sum(chunk.tokens for chunk in good), failed_saves=len(bad))
        state = flight.state
        state.saves -= 1
        if bad:
            state.next_chunk = min(state.next_chunk, *bad)
            state.saved_tail = min(state.saved_tail, min(bad) * self._grain.chunk)

    # -- small helpers --------------------------------------------------------------------------

    def _post(self, rank: int, order: WorkerOrder) -> None:
        if self._server is not None:
            self._server.post(rank, order)

    def _wake(self) -> None:
        if self._server is not None:
            self._server.wake()

    def _changed(self) -> None:
        """Something went that a request may have matched. Under the lock."""
        self._stores += 1

    def _numbers(self) -> tuple[dict[str, int], Stats, bool]:
        with self._lock:
            return dict(self._totals), self._manager.stats(), self._roster.complete

    def _count(self, **added: int) -> None:
        """Add to the totals. Under the lock, because both threads count."""
        for name, more in added.items():
            self._totals[name] += more
