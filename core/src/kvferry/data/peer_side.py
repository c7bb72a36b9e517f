"""The ways to the same rank of peers: carries out pulls over a channel."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

from attrs import define, evolve, frozen

from kvferry.api import Arena, Channel, ChannelContext, ErrorKind, KVFerryError, Region
from kvferry.control.grants import ARENA
from kvferry.control.orders import ItemFault
from kvferry.data.copy import SpanCopier
from kvferry.data.emptying import into_blocks, into_slots
from kvferry.data.engine_side import EngineSide
from kvferry.data.landing import Landing, Passage
from kvferry.data.meter import Meter, TierStatistics
from kvferry.data.mover import Mover, MoverStatistics
from kvferry.data.peer_links import PeerLinks, as_fault
from kvferry.data.plans import PeerLoad, TransferResult
from kvferry.data.priorities import leave_the_engines_core, stand_behind_the_engine
from kvferry.data.pulls import LANDING, PullListener, PullPlan, Reading, plan_pull
from kvferry.data.splitting import splitting
from kvferry.data.staging_side import StagingSide
from kvferry.data.wire import (
    Cancel,
    CloseChannel,
    ForgetPeer,
    MeetPeer,
    OpenChannel,
    PeerOrder,
    PullChunks,
    StageChunks,
)

_log = logging.getLogger(__name__)

CLOSE_SECONDS = 10.0
"""How long one attempt to close a channel may take."""
AGAIN_SECONDS = 0.1
"""Between two attempts, where the first raised anything but that its time was over."""


class PeerListener(PullListener, Protocol):
    """What becomes of the channel and its pulls. Called from any thread; must not block."""

    def channel_opened(self, epoch: bytes, export: bytes, shard: bytes, slot_bytes: int) -> None:
        """The channel is open in this epoch. What peers must know, see
        :class:`kvferry.data.wire.ChannelOpened`."""
        ...

    def channel_closed(self, epoch: bytes, reason: str) -> None:
        """It is not open in this epoch, and nothing of it is under way."""
        ...


@frozen(kw_only=True)
class LandingSetup:
    """Buffers of ``capacity`` bytes together, two chunks at the least, that reads pass through.
    ``make_arena(name, bytes)`` makes their memory, ``copier`` empties them."""

    capacity: int
    make_arena: Callable[[str, int], Arena]
    copier: SpanCopier
    verify: bool = False
    """As for :class:`kvferry.data.mover.Mover`."""


@define(eq=False)
class _Buffers:
    """The landing buffers while there are any."""

    arena: Arena
    region: Region
    landing: Landing
    mover: Mover
    copier: SpanCopier


@define(eq=False)
class _Opening:
    epoch: bytes
    channel: Channel
    export: bytes
    links: PeerLinks


class PeerSide:
    """Reads chunks out of the first tiers of peers. Decides nothing.

    ``make_channel()`` makes a new, closed channel for every opening; ``name`` is that in the configuration,
    and ``max_ops`` what its spec claims. Slots are those of the first tier's arena, cut as ``engine`` says
    for chunks of ``chunk_tokens``; the peer's are cut in the same way. ``retry_seconds`` is how long a peer
    that could not be connected to is taken for unreachable. ``variables`` is the channel's environment. With
    ``landing`` there are buffers that loads pass through. Deadlines are times of ``clock``. With ``staging``
    peers read what is copied into it; the first tier is not registered then.

    Threads: :meth:`take` from one thread, and it does not block. The channel is opened and closed on a thread
    of its own; connecting has one for each peer, as long as it takes. Everything else from any.
    """

    def __init__(
        self,
        name: str,
        make_channel: Callable[[], Channel],
        engine: EngineSide,
        chunk_tokens: int,
        *,
        rank: int,
        world_size: int,
        retry_seconds: float,
        max_ops: int | None = None,
        variables: Mapping[str, str] | None = None,
        landing: LandingSetup | None = None,
        staging: StagingSide | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._make_channel = make_channel
        self._engine = engine
        self._layout = engine.layout
        self._shard = engine.shard(rank, world_size)
        self._chunk_tokens = chunk_tokens
        self._rank = rank
        self._world_size = world_size
        self._retry_seconds = retry_seconds
        self._max_ops = max_ops
        self._variables = dict(variables or {})
        self._clock = clock
        self._landing = landing
        self._staging = staging
        self._buffers: _Buffers | None = None
        self._started: tuple[Region, PeerListener] | None = None
        self._read, self._read_lock = Meter(), threading.Lock()
        self._opening: _Opening | None = None
        """Written by the side's own thread alone."""
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._quiet = False
        self._thread: threading.Thread | None = None

    @property
    def name(self) -> str:
        return self._name

    def statistics(self) -> TierStatistics:
        """What was read from peers since the start. Any thread."""
        with self._read_lock:
            return TierStatistics(read_bytes=self._read.bytes, read_seconds=self._read.seconds)

    def load_statistics(self) -> MoverStatistics:
        """What went from the landing buffers into the engine's blocks. Any thread."""
        return MoverStatistics() if self._buffers is None else self._buffers.mover.statistics()

    def start(self, region: Region, listener: PeerListener) -> None:
        """Be ready for orders; nothing is opened yet. ``region`` is the first tier's arena.

        Raises :class:`KVFerryError` of kind ``CAPACITY`` when the landing buffers cannot be had.
        """
        self._started = region, listener
        if self._staging is not None:
            self._staging.start(region, listener)
        if self._landing is not None:
            self._buffers = self._make_buffers(self._landing)
            self._buffers.landing.start()
        self._thread = threading.Thread(target=self._run, name="kvferry-channel", daemon=True)
        self._thread.start()

    def stop(self, seconds: float) -> bool:
        """Close the channel. Idempotent. Whether nothing touches the region any more."""
        if self._thread is None:
            return True
        self._stopping.set()
        self._jobs.put(_wake)
        deadline = self._clock() + seconds
        self._thread.join(seconds)
        quiet = self._quiet
        if self._buffers is not None:
            quiet = self._buffers.landing.stop(max(0.0, deadline - self._clock())) and quiet
            if quiet:
                self._buffers.arena.close()
        return quiet

    def load(self, load: PeerLoad, deadline: float, ended: Callable[[TransferResult], None]) -> None:
        """Bring chunks of a peer into the engine's blocks, through the landing buffers, by a time of this
        side's clock. ``ended`` is called once, from any thread. Any thread; does not block."""
        transfer = load.transfer

        def told(faults: dict[int, ItemFault], reason: str) -> None:
            ended(TransferResult(transfer.id, tuple(sorted(faults)), reason))

        if self._buffers is None:
            told(dict.fromkeys(range(len(load.slots)), ItemFault.FAILED), "there are no landing buffers")
            return
        self._buffers.landing.submit(
            Passage(
                id=-transfer.id,  # orders have numbers of their own
                peer=load.peer,
                epoch=load.epoch,
                region=load.region,
                from_slots=load.slots,
                tokens=load.tokens,
                deadline=deadline,
                empty=into_blocks(self._buffers.mover, transfer),
                ended=told,
                may_be_early=True,  # it comes with the engine's step, and its peer over the side channel
            )
        )

    def take(self, order: PeerOrder) -> None:
        """Begin to carry out an order."""
        opening = self._opening
        match order:
            case OpenChannel():
                self._jobs.put(partial(self._open, order))
            case CloseChannel():
                self._jobs.put(partial(self._close, order.epoch))
            case PullChunks() if opening is None:
                faults = dict.fromkeys(range(len(order.slots)), ItemFault.CANCELLED)
                self._listener.done(order.id, faults, "the channel is not open")
            case StageChunks():
                assert self._staging is not None, "an order for a staging, and none is configured"
                self._staging.stage(order)
            case Cancel() if self._cancel_staging(order.id):
                pass
            case _ if opening is None:
                pass
            case MeetPeer():
                opening.links.meet(order)
            case ForgetPeer():
                opening.links.forget(order)
            case PullChunks() if self._staging is not None and self._buffers is not None:
                self._buffers.landing.submit(self._passage(order, self._buffers))
            case PullChunks():
                opening.links.pull(self._reading(order))
            case Cancel():
                opening.links.cancel(order.id)
                if self._buffers is not None:
                    self._buffers.landing.cancel(order.id)

    def _cancel_staging(self, number: int) -> bool:
        """Whether that is an order of the staging."""
        return self._staging is not None and self._staging.cancel(number)

    def _reading(self, order: PullChunks) -> Reading:
        return Reading(
            id=order.id,
            peer=order.peer,
            epoch=order.epoch,
            region=order.region,
            from_slots=order.from_slots,
            tokens=order.tokens,
            into=ARENA,
            slots=order.slots,
            deadline=order.deadline,
            listener=self._listener,
        )

    def _passage(self, order: PullChunks, buffers: _Buffers) -> Passage:
        """The first tier is not registered: what is read passes through the buffers."""
        layout, arena, listener = self._layout, self._region, self._listener
        lengths = [layout.value_bytes(tokens, self._chunk_tokens) for tokens in order.tokens]
        return Passage(
            id=order.id,
            peer=order.peer,
            epoch=order.epoch,
            region=order.region,
            from_slots=order.from_slots,
            tokens=order.tokens,
            deadline=order.deadline,
            empty=into_slots(
                buffers.copier, buffers.region, arena, layout, lengths, order.slots, listener.filled
            ),
            ended=partial(listener.done, order.id),
        )

    def _make_buffers(self, setup: LandingSetup) -> _Buffers:
        size = self._layout.total_bytes
        slots = max(2, setup.capacity // size)
        arena = setup.make_arena(LANDING, slots * size)
        region = arena.open()
        mover = Mover(self._engine, region, setup.copier, _nobody_asks, verify=setup.verify)
        return _Buffers(
            arena,
            region,
            Landing(slots, size, self._begin_reading, self._cancel_reading),
            mover,
            setup.copier,
        )

    def _begin_reading(self, reading: Reading) -> None:
        opening = self._opening
        if opening is None:
            faults = dict.fromkeys(range(len(reading.slots)), ItemFault.CANCELLED)
            reading.listener.done(reading.id, faults, "the channel is not open")
        else:
            opening.links.pull(reading)

    def _cancel_reading(self, number: int) -> None:
        opening = self._opening
        if opening is not None:
            opening.links.cancel(number)

    def reading_began(self) -> None:
        with self._read_lock:
            self._read.begin(self._clock())

    def reading_ended(self, moved: int) -> None:
        with self._read_lock:
            self._read.end(self._clock(), moved)

    # The thread that opens, closes, and ends what waited too long

    def _run(self) -> None:
        leave_the_engines_core()
        stand_behind_the_engine()
        while not self._stopping.is_set():
            try:
                self._next_job()()
            except Exception:  # noqa: BLE001 - what comes after it is carried out all the same
                _log.exception("kvferry: an order to channel %s failed", self._name)
        self._close(None)
        self._quiet = True

    def _next_job(self) -> Callable[[], None]:
        opening = self._opening
        patience = None if opening is None else opening.links.expire()
        try:
            return self._jobs.get(timeout=patience)
        except queue.Empty:
            return _wake

    def _open(self, order: OpenChannel) -> None:
        opening = self._opening
        if opening is not None and opening.epoch != order.epoch:
            self._close(None)
            opening = None
        if opening is None:
            try:
                opening = self._opened(order)
            except Exception as error:  # noqa: BLE001 - whatever a channel raises, it is told of as closed
                fault = as_fault(error, f"the channel {self._name} cannot be opened")
                _log.debug("kvferry: channel %s is not open: %s", self._name, fault)
                self._listener.channel_closed(order.epoch, str(fault))
                return
            self._opening = opening
        self._listener.channel_opened(order.epoch, opening.export, self._shard, self._layout.total_bytes)

    def _opened(self, order: OpenChannel) -> _Opening:
        context = ChannelContext(
            name=self._name,
            instance=order.instance,
            epoch=order.epoch,
            rank=self._rank,
            world_size=self._world_size,
            clock=self._clock,
            variables=self._variables,
        )
        channel = splitting(self._make_channel(), self._max_ops)
        channel.open(context)
        try:
            if self._staging is None:
                channel.register(evolve(self._region, name=ARENA))
            else:
                channel.register(self._staging.open())
            if self._buffers is not None:
                channel.register(evolve(self._buffers.region, name=LANDING))
            export = channel.export()
        except Exception:
            self._end(channel)
            self._close_staging()
            raise
        links = PeerLinks(channel, context, self._plan, self, self._jobs.put, self._retry_seconds)
        return _Opening(order.epoch, channel, export, links)

    def _plan(self, reading: Reading, length: int) -> PullPlan:
        ours = self._region
        if reading.into == LANDING:
            assert self._buffers is not None, "a reading names buffers that are not there"
            ours = self._buffers.region
        return plan_pull(reading, self._layout, self._chunk_tokens, ours.length, length)

    def _close(self, epoch: bytes | None) -> None:
        """Close the opening of this epoch, or whichever there is."""
        opening = self._opening
        if opening is not None and epoch in (None, opening.epoch):
            opening.links.begin_closing()
            self._end(opening.channel)
            opening.links.finish_closing()
            if self._buffers is not None:
                self._buffers.landing.settle()
            self._close_staging()
            self._opening = None
            epoch = opening.epoch
        if epoch is not None:
            self._listener.channel_closed(epoch, "")

    def _close_staging(self) -> None:
        """The channel is closed: nobody reads it any more."""
        if self._staging is not None:
            self._staging.close()

    def _end(self, channel: Channel) -> None:
        """Close a channel, however long it takes: until then it may touch the region."""
        level = logging.WARNING
        while True:
            try:
                channel.close(self._clock() + CLOSE_SECONDS)
                break
            except Exception as error:  # noqa: BLE001 - it is open still, whatever it raises
                _log.log(level, "kvferry: channel %s does not end: %s", self._name, error)
                level = logging.DEBUG
                if not isinstance(error, KVFerryError) or error.kind is not ErrorKind.TIMEOUT:
                    time.sleep(AGAIN_SECONDS)

    @property
    def _region(self) -> Region:
        assert self._started is not None, "start() was not called"
        return self._started[0]

    @property
    def _listener(self) -> PeerListener:
        assert self._started is not None, "start() was not called"
        return self._started[1]


def _nobody_asks(_transfer: object, _result: object) -> None:
    """For a mover whose results go back to who calls it."""


def _wake() -> None:
    """Look around again."""
