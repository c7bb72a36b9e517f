"""Other instances, as one's scheduler drives it: messages out to a carrier, answers back under the lock."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from attrs import field, frozen

from kvferry.api import (
    Answer,
    Candidate,
    KVFerryError,
    PeerCard,
    PeerCarrier,
    PeerDesk,
    PeerId,
    RankCard,
    ServableChanges,
)
from kvferry.control.borrowing import Borrowing
from kvferry.control.loans import Standing
from kvferry.control.manager import CacheManager
from kvferry.control.orders import CancelOrder, StageOrder
from kvferry.control.serving import Serving, ServingSettings
from kvferry.control.tells import FindHolders, Greet, Tell, TellAsk, TellDone, TellRenew
from kvferry.data.wire import (
    Cancel,
    ChannelClosed,
    ChannelOpened,
    OpenChannel,
    OrderDone,
    StageChunks,
    WorkerOrder,
)
from kvferry.runtime.fair_lock import FairLock
from kvferry.runtime.lending import Lending
from kvferry.runtime.orders_of_all import OrdersOfAll
from kvferry.runtime.sharing_statistics import (
    BORROW_COUNTS,
    LEND_COUNTS,
    PeerState,
    SharingState,
    SharingStatistics,
)

logger = logging.getLogger(__name__)

SERVABLE_KEPT = 65536
"""Chunks that came or went and that nobody has taken; beyond that all are told anew."""
CLOSE_SECONDS = 2.0
"""How long a carrier may take to say goodbye."""


@frozen(kw_only=True)
class SharingSetup:
    """``id`` is this life of the instance; ``namespace`` whose chunks it has; ``channel`` the name under
    which its channel is chosen; ``keep`` says whether what was read into the engine's blocks is stored here,
    too."""

    id: PeerId
    namespace: bytes
    chunk_tokens: int
    block_tokens: int
    channel: str
    carrier: PeerCarrier
    serving: ServingSettings = field(factory=ServingSettings)
    keep: bool = True


class Sharing:
    """A :class:`kvferry.api.PeerHost` over a scheduler.

    ``lock`` guards the manager and ``borrowing``. ``post(rank, order)`` sends to a worker and does not wait;
    ``wake()`` has :meth:`work` called soon. ``next_order()`` gives numbers that no other order of the workers
    has. ``clock`` is the manager's.

    Threads: :meth:`open`, :meth:`on_message`, :meth:`work` and :meth:`close` on the service's, the rest on
    any.
    """

    def __init__(
        self,
        setup: SharingSetup,
        manager: CacheManager,
        borrowing: Borrowing,
        lock: FairLock,
        *,
        world_size: int,
        post: Callable[[int, WorkerOrder], None],
        wake: Callable[[], None],
        next_order: Callable[[], int],
        clock: Callable[[], float],
    ) -> None:
        self._setup = setup
        self._borrowing = borrowing
        self._lock = lock
        self._ranks = range(world_size)
        self._post = post
        self._wake = wake
        self._clock = clock
        self._serving = Serving(manager, setup.serving, next_order)
        self._orders = OrdersOfAll(self._ranks)
        self._lending = Lending(self._serving, lock, clock, wake)
        self._opened: dict[int, RankCard] = {}
        self._reason = ""
        self._carried = False
        self._retired = False
        self._copying = manager.copying

    @property
    def desk(self) -> PeerDesk:
        return self._lending

    @property
    def serving(self) -> Serving:
        """What peers are lent. Under the lock."""
        return self._serving

    # On the service thread

    def open(self) -> None:
        """All workers are there: have their channels opened."""
        for rank in self._ranks:
            self._post(rank, OpenChannel(self._setup.id.instance, self._setup.id.epoch))

    def on_message(self, message: ChannelOpened | ChannelClosed) -> None:
        """What a worker tells of its channel. Once all are open, peers are told of this instance."""
        if message.channel_epoch != self._setup.id.epoch:
            return
        if isinstance(message, ChannelClosed):
            self._opened.pop(message.rank, None)
            if message.reason:
                self._reason = f"rank {message.rank}: {message.reason}"
                logger.warning(
                    "kvferry: rank %d shares nothing with other instances: %s", message.rank, message.reason
                )
            return
        self._opened[message.rank] = RankCard(
            shard=message.shard, slot_bytes=message.slot_bytes, export=message.export
        )
        if len(self._opened) == len(self._ranks) and not self._carried and not self._retired:
            self._carried = True
            with self._lock:
                self._copying.watch_servable(SERVABLE_KEPT)
            self._setup.carrier.open(self, self._card())

    def on_done(self, message: OrderDone) -> None:
        """What a worker tells of an order; passed over if it is none of here."""
        end = self._orders.done(message)
        if end is None:
            return
        result = end.result
        if result.faults:
            logger.debug(
                "kvferry: %d chunks were not staged for a peer: %s", len(result.faults), result.reason
            )
        with self._lock:
            self._serving.report(result, self._clock())

    def workers_lost(self) -> None:
        """No worker is left. Under the lock; the manager was told before."""
        self._orders.clear()
        self._serving.workers_lost()

    def work(self) -> None:
        """Send what is to be sent, and end what is over."""
        now = self._clock()
        if self._retired and self._carried:
            self.close()
        with self._lock:
            if now >= self._serving.next_deadline():
                self._serving.expire(now)
            tells = self._borrowing.take()
            orders = self._serving.take_orders()
            answers = self._serving.take_answers()
            served = self._copying.has_servable
        if served and self._carried:
            self._setup.carrier.served()
        for order in orders:
            self._stage(order)
        for peer, answer in answers:
            if self._carried:
                self._setup.carrier.answer(peer, answer)
        for tell in tells:
            self._send(tell)

    def retire(self) -> None:
        """Share nothing any more: nobody else can know which weights chunks are computed with from now on.
        From the scheduler's thread, before anything is stored again."""
        with self._lock:
            self._retired = True
            self._lending.retire()
            self._borrowing.give_up_all()
        self._wake()
        logger.warning(
            "kvferry: the engine's cache was reset, so nothing is shared with other instances any more"
        )

    def close(self) -> None:
        """Say goodbye to peers. Idempotent."""
        if self._carried:
            self._carried = False
            try:
                self._setup.carrier.close(self._clock() + CLOSE_SECONDS)
            except KVFerryError as error:
                logger.warning("kvferry: %s", error)

    def next_deadline(self) -> float:
        """When :meth:`work` has something to do next, if nothing happens before."""
        return self._lending.next_deadline()

    def standings(self) -> dict[PeerId, tuple[Standing, str]]:
        """How peers are that something was wanted of, each with the reason."""
        with self._lock:
            return self._borrowing.peers()

    def counts(self) -> dict[str, int]:
        """What was borrowed since the start, see :attr:`Borrowing.counts`."""
        with self._lock:
            return dict(self._borrowing.counts)

    # From any thread

    def statistics(self, borrowed_tokens: int) -> SharingStatistics:
        """What is borrowed and lent. ``borrowed_tokens`` are those of the engine's hits."""
        state = SharingState.OPEN if self._carried else SharingState.OPENING
        with self._lock:
            peers = self._borrowing.peers()
            borrowed = dict(self._borrowing.counts)
            lent = {name.replace(" ", "_"): count for name, count in self._serving.counts.items()}
            loans = self._borrowing.loans
            leases, slots = self._serving.leases, self._serving.slots
        return SharingStatistics(
            id=self._setup.id,
            channel=self._setup.channel,
            state=SharingState.RETIRED if self._retired else state,
            reason=self._reason,
            peers=tuple(
                PeerState(id=peer, standing=standing.value, reason=reason)
                for peer, (standing, reason) in sorted(peers.items())
            ),
            borrowed_tokens=borrowed_tokens,
            loans=loans,
            borrowed={**dict.fromkeys(BORROW_COUNTS, 0), **borrowed},
            leases=leases,
            slots=slots,
            lent={**dict.fromkeys(LEND_COUNTS, 0), **lent},
        )

    def take_servable(self, limit: int) -> ServableChanges:
        with self._lock:
            return self._copying.take_servable(limit)

    def walk_servable(self, cursor: int, limit: int) -> tuple[list[bytes], int | None]:
        with self._lock:
            return self._copying.walk_servable(cursor, limit)

    def found(self, quest: int, candidates: Sequence[Candidate]) -> None:
        with self._lock:
            self._borrowing.found(quest, candidates, self._clock())
        self._wake()

    def agreed(self, card: PeerCard) -> None:
        exports = [rank.export for rank in card.ranks]
        with self._lock:
            if len(exports) == len(self._ranks):
                self._borrowing.agreed(card.id, exports, self._clock())
            else:
                self._borrowing.lost(card.id, f"it has {len(exports)} ranks", self._clock())
        self._wake()

    def lost(self, peer: PeerId, reason: str) -> None:
        with self._lock:
            self._borrowing.lost(peer, reason, self._clock())
        self._wake()

    def answered(self, peer: PeerId, answer: Answer) -> None:
        with self._lock:
            self._borrowing.answered(peer, answer, self._clock())
        self._wake()

    def renewed(self, peer: PeerId, number: int, turn: int, seconds: float) -> None:
        with self._lock:
            self._borrowing.renewed(peer, number, turn, seconds)

    def _card(self) -> PeerCard:
        setup = self._setup
        return PeerCard(
            id=setup.id,
            namespace=setup.namespace,
            chunk_tokens=setup.chunk_tokens,
            block_tokens=setup.block_tokens,
            channel=setup.channel,
            ranks=tuple(self._opened[rank] for rank in self._ranks),
        )

    def _stage(self, order: StageOrder | CancelOrder) -> None:
        message: WorkerOrder
        match order:
            case StageOrder(number, tokens, sources, slots, seconds):
                self._orders.begin(number, "staging")
                message = StageChunks(number, tokens, sources, slots, seconds)
            case CancelOrder(number, tier):
                message = Cancel(number, tier)
        for rank in self._ranks:
            self._post(rank, message)

    def _send(self, tell: Tell) -> None:
        carrier = self._setup.carrier
        if not self._carried or self._retired:
            # Nothing is known of others yet: whoever waits goes on at once.
            if isinstance(tell, FindHolders):
                self.found(tell.id, ())
            return
        match tell:
            case FindHolders(quest, digests, deadline):
                carrier.find(quest, digests, deadline)
            case Greet(peer, address):
                carrier.greet(peer, address)
            case TellAsk(peer, ask):
                carrier.ask(peer, ask)
            case TellRenew(peer, number, turn):
                carrier.renew(peer, number, turn)
            case TellDone(peer, number):
                carrier.done(peer, number)
