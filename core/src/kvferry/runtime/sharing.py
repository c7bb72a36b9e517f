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
from kvferry.control.serving import Serving, ServingSettings
from kvferry.control.tells import FindHolders, Greet, Tell, TellAsk, TellDone, TellRenew
from kvferry.data.wire import ChannelClosed, ChannelOpened, OpenChannel, WorkerOrder
from kvferry.runtime.fair_lock import FairLock
from kvferry.runtime.lending import Lending

logger = logging.getLogger(__name__)

SERVABLE_KEPT = 65536
"""Chunks that came or went and that nobody has taken; beyond that all are told anew."""
CLOSE_SECONDS = 2.0
"""How long a carrier may take to say goodbye."""


@frozen(kw_only=True)
class SharingSetup:
    """``id`` is this life of the instance; ``namespace`` whose chunks it has; ``channel`` the name under
    which its channel is chosen."""

    id: PeerId
    namespace: bytes
    chunk_tokens: int
    block_tokens: int
    channel: str
    carrier: PeerCarrier
    serving: ServingSettings = field(factory=ServingSettings)


class Sharing:
    """A :class:`kvferry.api.PeerHost` over a scheduler.

    ``lock`` guards the manager and ``borrowing``. ``post(rank, order)`` sends to a worker and does not wait;
    ``wake()`` has :meth:`work` called soon. ``clock`` is the manager's.

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
        clock: Callable[[], float],
    ) -> None:
        self._setup = setup
        self._borrowing = borrowing
        self._lock = lock
        self._ranks = range(world_size)
        self._post = post
        self._wake = wake
        self._clock = clock
        self._serving = Serving(manager, setup.serving)
        self._lending = Lending(self._serving, lock, clock, wake)
        self._opened: dict[int, RankCard] = {}
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

    def work(self) -> None:
        """Send what is to be sent, and end what is over."""
        now = self._clock()
        if self._retired and self._carried:
            self.close()
        with self._lock:
            if now >= self._serving.next_deadline():
                self._serving.expire(now)
            tells = self._borrowing.take()
            served = self._copying.has_servable
        if served and self._carried:
            self._setup.carrier.served()
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
