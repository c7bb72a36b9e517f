"""The ways to the same rank of peers: carries out pulls over a channel."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

from attrs import define, evolve

from kvferry.api import Channel, ChannelContext, ErrorKind, KVFerryError, Region
from kvferry.control.orders import ItemFault
from kvferry.data.engine_side import EngineSide
from kvferry.data.meter import Meter, TierStatistics
from kvferry.data.peer_links import PeerLinks, PullListener, as_fault
from kvferry.data.priorities import leave_the_engines_core, stand_behind_the_engine
from kvferry.data.pulls import ARENA, PullPlan, plan_pull
from kvferry.data.splitting import splitting
from kvferry.data.wire import (
    Cancel,
    CloseChannel,
    ForgetPeer,
    MeetPeer,
    OpenChannel,
    PeerOrder,
    PullChunks,
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
    that could not be connected to is taken for unreachable. ``variables`` is the channel's environment.

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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._make_channel = make_channel
        self._layout = engine.layout
        self._shard = engine.shard(rank, world_size)
        self._chunk_tokens = chunk_tokens
        self._rank = rank
        self._world_size = world_size
        self._retry_seconds = retry_seconds
        self._max_ops = max_ops
        self._variables = dict(variables or {})
        self._clock = clock
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

    def start(self, region: Region, listener: PeerListener) -> None:
        """Be ready for orders; nothing is opened yet. ``region`` is the first tier's arena."""
        self._started = region, listener
        self._thread = threading.Thread(target=self._run, name="kvferry-channel", daemon=True)
        self._thread.start()

    def stop(self, seconds: float) -> bool:
        """Close the channel. Idempotent. Whether nothing touches the region any more."""
        if self._thread is None:
            return True
        self._stopping.set()
        self._jobs.put(_wake)
        self._thread.join(seconds)
        return self._quiet

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
            case _ if opening is None:
                pass
            case MeetPeer():
                opening.links.meet(order)
            case ForgetPeer():
                opening.links.forget(order)
            case PullChunks():
                opening.links.pull(order)
            case Cancel():
                opening.links.cancel(order.id)

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
            channel.register(evolve(self._region, name=ARENA))
            export = channel.export()
        except Exception:
            self._end(channel)
            raise
        links = PeerLinks(
            channel, context, self._plan, self._listener, self, self._jobs.put, self._retry_seconds
        )
        return _Opening(order.epoch, channel, export, links)

    def _plan(self, order: PullChunks, length: int) -> PullPlan:
        return plan_pull(order, self._layout, self._chunk_tokens, self._region.length, length)

    def _close(self, epoch: bytes | None) -> None:
        """Close the opening of this epoch, or whichever there is."""
        opening = self._opening
        if opening is not None and epoch in (None, opening.epoch):
            opening.links.begin_closing()
            self._end(opening.channel)
            opening.links.finish_closing()
            self._opening = None
            epoch = opening.epoch
        if epoch is not None:
            self._listener.channel_closed(epoch, "")

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


def _wake() -> None:
    """Look around again."""
