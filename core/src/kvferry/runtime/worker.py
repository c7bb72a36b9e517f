"""The worker side of one rank: executes plans, reports outcomes, decides nothing about keys."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Collection, Sequence

import msgspec
from attrs import field, frozen

from kvferry.control.orders import ItemFault
from kvferry.data.copy import SpanCopier
from kvferry.data.engine_side import EngineSide
from kvferry.data.meter import TierStatistics
from kvferry.data.mover import Mover, MoverStatistics
from kvferry.data.peer_side import PeerSide
from kvferry.data.plans import Direction, PeerLoad, StepPlan, Transfer, TransferResult
from kvferry.data.store_side import SlotStore
from kvferry.data.tier_side import TierSide
from kvferry.data.wire import (
    WIRE_VERSION,
    Bye,
    ChannelClosed,
    ChannelOpened,
    Chunk,
    Done,
    FromWorker,
    Hello,
    OrderDone,
    PeerOrder,
    PullChunks,
    Ready,
    TierClosed,
    TierContent,
    TierOrder,
    WorkerOrder,
)
from kvferry.runtime.address import MeetingPlace
from kvferry.runtime.side_channel import SideChannelClient

logger = logging.getLogger(__name__)

FLUSH_SECONDS = 0.25
"""How long a preemption may wait for saves of the blocks it takes; later saves are dropped."""
IDLE_WAIT_SECONDS = 0.02
"""How long a step without tokens waits for copies, instead of turning the engine's loop in vain."""
RISING_WAIT_SECONDS = 0.005
"""The same for chunks that come up from a lower tier, whose end the scheduler hears of a moment later."""
SEEKING_WAIT_SECONDS = 0.0005
"""The same for answers of other instances, of whose coming nothing is heard here."""
SHORT_WAITS = 10
"""So many are as short after something has come."""
CLOSE_SECONDS = 5.0


@frozen(kw_only=True)
class StepReport:
    """What the engine must hear after a step. Every request id appears exactly once per load and
    once per end."""

    finished_sending: frozenset[str] = field(factory=frozenset)
    finished_receiving: frozenset[str] = field(factory=frozenset)
    failed_receiving: frozenset[str] = field(factory=frozenset)
    """Also in ``finished_receiving``."""
    invalid_blocks: frozenset[int] = field(factory=frozenset)
    """Of the first group; says everything only for an engine with one group and no window."""


class WorkerRuntime:
    """One rank. The step methods belong to the worker's thread.

    ``failures`` counts synchronous loads that failed. From the step in which one failed until the
    scheduler has seen it, nothing that the forward pass computed may be saved, because it may have
    read the bytes that are missing.
    """

    def __init__(
        self,
        engine: EngineSide,
        store: SlotStore,
        copier: SpanCopier,
        place: MeetingPlace,
        *,
        rank: int,
        world_size: int,
        epoch: int,
        fingerprint: str,
        verify: bool = False,
        tiers: Sequence[TierSide] = (),
        peers: PeerSide | None = None,
    ) -> None:
        self._tiers = {tier.name: tier for tier in tiers}
        self._peers = peers
        self._fetched = threading.Event()
        self._short_waits = 0
        self._engine = engine
        self._store = store
        self._copier = copier
        self._place = place
        self._rank = rank
        self._world_size = world_size
        self._epoch = epoch
        self._fingerprint = fingerprint
        self._verify = verify
        self._mover: Mover | None = None
        self._client: SideChannelClient | None = None
        self._lock = threading.Lock()
        self._arrived: list[tuple[Transfer, TransferResult]] = []
        self._loading: Counter[str] = Counter()
        """Loads of each request beside forward passes that have no result yet."""
        self._lead = 0.0
        """See :class:`kvferry.data.wire.Lead`."""
        self._ended: set[str] = set()
        self._sync_results: list[tuple[Transfer, TransferResult]] = []
        self.failures = 0

    def open(self) -> None:
        """Open the tier, start the mover and the side channel. Does not wait for the scheduler."""
        region = self._store.open(self._announce_ready)
        self._mover = Mover(self._engine, region, self._copier, self._on_result, verify=self._verify)
        self._mover.open()
        self._client = SideChannelClient(
            self._place.endpoint,
            f"{self._rank}-{self._epoch}",
            self._place.read_token,
            self._hello,
            self._ready,
            self._refused,
            self._order,
            self._set_lead,
        )
        for tier in self._tiers.values():
            tier.start(region, self)
        if self._peers is not None:
            self._peers.start(region, self)
        self._client.open()
        self._announce_ready()

    def close(self) -> None:
        """Stop copying, say good-bye, give the memory back. Idempotent."""
        quiet = True
        for tier in self._tiers.values():
            if not tier.stop(CLOSE_SECONDS):
                logger.error(
                    "kvferry: tier %s did not end in %g s; its memory stays mapped", tier.name, CLOSE_SECONDS
                )
                quiet = False
        if self._peers is not None and not self._peers.stop(CLOSE_SECONDS):
            logger.error(
                "kvferry: channel %s did not end in %g s; the memory stays mapped",
                self._peers.name,
                CLOSE_SECONDS,
            )
            quiet = False
        if self._mover is not None:
            ended = self._mover.close(CLOSE_SECONDS) and quiet
            if self._client is not None:
                if ended:
                    self._client.send(Bye(rank=self._rank, epoch=self._epoch))
                self._client.close()
            if not ended:
                logger.error("kvferry: a copy did not end in %g s; its memory stays mapped", CLOSE_SECONDS)
                return
        self._store.close()

    # -- the step -------------------------------------------------------------------------------

    def before_overwrite(self, plan: StepPlan) -> None:
        """Blocks of the requests in ``plan.flush`` may be overwritten after this returns."""
        if plan.flush:
            started = time.monotonic()
            if not self._running().finish_saves(plan.flush, FLUSH_SECONDS):
                logger.warning(
                    "kvferry: dropped saves of preempted requests after %.0f ms",
                    1000 * (time.monotonic() - started),
                )

    def start_loads(self, plan: StepPlan) -> None:
        """Run the synchronous loads to their end, submit the others."""
        for transfer in plan.sync_loads:
            result = self._running().run_now(transfer)
            if result.failed_slots:
                self.failures += 1
            self._sync_results.append((transfer, result))
            self._send(result)
        with self._lock:
            self._loading.update(transfer.request_id for transfer in plan.loads)
            self._loading.update(load.transfer.request_id for load in plan.peer_loads)
        if plan.loads:
            self._running().submit(plan.loads)
        for load in plan.peer_loads:
            self._load_from_peer(load)

    def _load_from_peer(self, load: PeerLoad) -> None:
        transfer = load.transfer
        if self._peers is None:
            slots = tuple(transfer.slot_numbers())
            self._on_result(transfer, TransferResult(transfer.id, slots, "there is no channel"))
            return
        deadline = min(load.deadline + self._lead, time.monotonic() + load.seconds)
        self._peers.load(load, deadline, lambda result: self._on_result(transfer, result))

    def submit_saves(self, plan: StepPlan, failures_seen: int) -> None:
        """Queue the step's saves; the forward pass has been submitted before.

        ``failures_seen`` is how many of this rank's failures the scheduler knew when it made the
        plan.
        """
        if plan.saves and failures_seen < self.failures:
            for transfer in plan.saves:
                slots = tuple(transfer.slot_numbers())
                self._send(TransferResult(transfer.id, slots, "computed after a load that failed"))
        elif plan.saves:
            self._running().submit(plan.saves)
        self._ended.update(plan.ended)

    def report(self, plan: StepPlan) -> StepReport:
        """What happened up to now. Call once per step, after :meth:`submit_saves`."""
        mover = self._running()
        sent = self._sent(mover)
        if plan.idle and not sent and not self._has_arrived():
            # An engine that waits for nothing but copies would otherwise turn its loop in vain, and
            # take the interpreter away from the thread that copies.
            mover.wait_for_end(self._ended, IDLE_WAIT_SECONDS)
            sent = self._sent(mover)
            if (plan.rising or self._loading) and not sent and not self._has_arrived():
                # The same for an engine that waits for a lower tier, or for a peer.
                self._wait_for_others(plan)
        arrived = self._take_arrived()
        sync, self._sync_results = self._sync_results, []
        self._ended -= sent
        failed = {transfer.request_id for transfer, result in arrived if result.failed_slots}
        invalid: set[int] = set()
        for transfer, result in [*arrived, *sync]:
            invalid |= _blocks_of(transfer, result.failed_slots)
        return StepReport(
            finished_sending=frozenset(sent),
            finished_receiving=frozenset(transfer.request_id for transfer, _ in arrived),
            failed_receiving=frozenset(failed),
            invalid_blocks=frozenset(invalid),
        )

    def _wait_for_others(self, plan: StepPlan) -> None:
        short = plan.seeking or self._short_waits > 0
        self._short_waits = max(0, self._short_waits - 1)
        if self._fetched.wait(SEEKING_WAIT_SECONDS if short else RISING_WAIT_SECONDS):
            self._fetched.clear()
            # The scheduler hears of it at the same time, and may be asked again before it has.
            self._short_waits = SHORT_WAITS

    def _has_arrived(self) -> bool:
        with self._lock:
            return any(transfer.request_id not in self._loading for transfer, _ in self._arrived)

    def _take_arrived(self) -> list[tuple[Transfer, TransferResult]]:
        """Loads of requests that wait for nothing more: the blocks of one may be filled from two places."""
        with self._lock:
            if not self._arrived:
                return []
            loading = self._loading
            arrived = [each for each in self._arrived if each[0].request_id not in loading]
            self._arrived = [each for each in self._arrived if each[0].request_id in loading]
        return arrived

    def _sent(self, mover: Mover) -> set[str]:
        return {name for name in self._ended if mover.pending(name, Direction.SAVE) == 0}

    def statistics(self) -> MoverStatistics:
        own = self._running().statistics()
        return own if self._peers is None else own.plus(self._peers.load_statistics())

    def tier_statistics(self) -> dict[str, TierStatistics]:
        """What went through each lower tier on this rank, by its name. Any thread."""
        return {name: tier.statistics() for name, tier in self._tiers.items()}

    def peer_statistics(self) -> TierStatistics | None:
        """What was read from peers on this rank, if it has a channel. Any thread."""
        return None if self._peers is None else self._peers.statistics()

    # -- lower tiers and peers, on their threads --------------------------------------------------

    def content(
        self, tier: str, opening: int, chunks: Sequence[Chunk], foreign: Sequence[bytes], last: bool
    ) -> None:
        self._tell(TierContent(self._rank, self._epoch, tier, opening, tuple(chunks), tuple(foreign), last))

    def closed(self, tier: str, opening: int, reason: str) -> None:
        self._tell(TierClosed(self._rank, self._epoch, tier, opening, reason))

    def channel_opened(self, epoch: bytes, export: bytes, shard: bytes, slot_bytes: int) -> None:
        self._tell(ChannelOpened(self._rank, self._epoch, epoch, export, shard, slot_bytes))

    def channel_closed(self, epoch: bytes, reason: str) -> None:
        self._tell(ChannelClosed(self._rank, self._epoch, epoch, reason))

    def done(self, order: int, faults: dict[int, ItemFault], reason: str) -> None:
        named = {place: fault.value for place, fault in faults.items()}
        self._tell(OrderDone(self._rank, self._epoch, order, named, reason))
        self._fetched.set()

    def filled(self, slots: Collection[int]) -> None:
        self._running().filled(slots)

    def _set_lead(self, seconds: float) -> None:
        self._lead = seconds

    def _order(self, order: WorkerOrder) -> None:
        if isinstance(order, TierOrder) and order.tier:
            self._tiers[order.tier].take(order)
        elif isinstance(order, PeerOrder):
            assert self._peers is not None, "an order for a channel, and none is configured"
            if isinstance(order, PullChunks):
                order = msgspec.structs.replace(order, deadline=order.deadline + self._lead)
            self._peers.take(order)

    def _tell(self, message: FromWorker) -> None:
        if self._client is not None:
            self._client.send(message)

    # -- side channel ---------------------------------------------------------------------------

    def _on_result(self, transfer: Transfer, result: TransferResult) -> None:
        if transfer.direction is Direction.LOAD:
            with self._lock:
                self._arrived.append((transfer, result))
                self._loading[transfer.request_id] -= 1
                if not self._loading[transfer.request_id]:
                    del self._loading[transfer.request_id]
            self._fetched.set()
        self._send(result)

    def _send(self, result: TransferResult) -> None:
        self._tell(Done(rank=self._rank, epoch=self._epoch, results=(result,)))

    def _announce_ready(self) -> None:
        self._tell(self._ready())

    def _ready(self) -> FromWorker:
        return Ready(
            rank=self._rank, epoch=self._epoch, slots=self._store.ready_slots(), clock=time.monotonic()
        )

    def _hello(self, token: str) -> Hello:
        return Hello(
            version=WIRE_VERSION,
            token=token,
            rank=self._rank,
            world_size=self._world_size,
            epoch=self._epoch,
            fingerprint=self._fingerprint,
            slots=self._store.slots,
            slot_bytes=self._engine.layout.total_bytes,
            clock=time.monotonic(),
        )

    def _refused(self, reason: str) -> None:
        logger.error("kvferry: the scheduler refused rank %d: %s; no cache here", self._rank, reason)

    def _running(self) -> Mover:
        assert self._mover is not None, "open() was not called"
        return self._mover


def _blocks_of(transfer: Transfer, slots: Collection[int]) -> set[int]:
    if not slots:
        return set()
    bad, first = set(slots), transfer.groups[0]
    return {
        block
        for slot, block in zip(first.slot_column.tolist(), first.block_column.tolist(), strict=True)
        if slot in bad
    }
