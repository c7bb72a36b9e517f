"""Workers of a fleet: they read each other's memory piece by piece, and look at what they read."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from attrs import define, field

from kvferry.control.grants import STAGING
from kvferry.control.orders import ItemFault
from kvferry.data.wire import (
    Cancel,
    ChannelOpened,
    ForgetPeer,
    FromWorker,
    MeetPeer,
    OpenChannel,
    OrderDone,
    PullChunks,
    StageChunks,
    WorkerOrder,
)
from tests.simulation.events import require
from tests.simulation.fleet_parts import GARBAGE, Memory, Process, cell

if TYPE_CHECKING:
    from tests.simulation.fleet_life import Life

SLOW_SECONDS = (0.2, 4.0)


@define(eq=False)
class Pull:
    """An order under way on one rank."""

    order: PullChunks
    weights: int
    left: int
    told: Callable[[int, dict[int, ItemFault]], None] | None = None
    """Hears of the end, of what goes into an engine's blocks and into no slot."""
    faults: dict[int, ItemFault] = field(factory=dict)
    cancelled: bool = False


@define(eq=False)
class Staging:
    """Copies for a peer, one after the other."""

    order: StageChunks
    deadline: float
    at: int = 0
    faults: dict[int, ItemFault] = field(factory=dict)
    cancelled: bool = False


class Worker:
    """One rank of one life. Reads end at their deadline, however long the other side takes."""

    def __init__(self, life: Life, rank: int, slots: int) -> None:
        self.life = life
        self.rank = rank
        self.process = Process(life.loop)
        self.memory = Memory.of(slots)
        self.met: dict[str, tuple[bytes, Life]] = {}
        self.staging = Memory.of(life.world.settings.staging or 0)
        self.pulls: dict[int, Pull] = {}
        self.stagings: dict[int, Staging] = {}
        self.written: dict[int, int] = {}
        """Slots that something may be written into at this moment, and how often."""

    def take(self, order: WorkerOrder) -> None:
        """An order came."""
        match order:
            case OpenChannel():
                self._tell(
                    ChannelOpened(
                        rank=self.rank,
                        epoch=1,
                        channel_epoch=order.epoch,
                        shard=b"shard",
                        slot_bytes=CHANNEL_BYTES,
                        export=self.life.world.export(self.life, self.rank),
                    )
                )
            case MeetPeer():
                self.met[order.peer] = (order.epoch, self.life.world.life_of(order.export))
            case ForgetPeer():
                if self.met.get(order.peer, (b"", None))[0] == order.epoch:
                    del self.met[order.peer]
            case PullChunks():
                self._begin(order)
            case StageChunks():
                self._stage(Staging(order, self.life.clock() + order.seconds))
            case Cancel():
                if order.id in self.stagings:
                    self.life.world.saw("staging: cancelled")
                    self.stagings[order.id].cancelled = True
                if order.id in self.pulls:
                    self.life.world.saw("cancelled under way")
                    self.pulls[order.id].cancelled = True

    def _tell(self, message: FromWorker) -> None:
        life = self.life
        life.world.post(
            "result",
            lambda: life.process.do("result", lambda: life.deliver(message)),
            can_be_lost=False,
        )

    # Pulls

    def load(self, order: PullChunks, told: Callable[[int, dict[int, ItemFault]], None]) -> None:
        """Read chunks of a peer into blocks of the engine. Its peer may be told of later."""
        epoch, _ = self.met.get(order.peer, (b"", None))
        if epoch != order.epoch and self.life.clock() < order.deadline and not self.life.world.calm:
            self.life.world.saw("load: before its peer")
            self.process.after(0.05, "load", lambda: self.load(order, told))
            return
        self._begin(order, told)

    def _begin(
        self, order: PullChunks, told: Callable[[int, dict[int, ItemFault]], None] | None = None
    ) -> None:
        if order.id in self.pulls:
            return
        pull = self.pulls[order.id] = Pull(order, self.life.weights, len(order.slots), told)
        random = self.life.loop.random
        for place, slot in enumerate(order.slots):
            if told is None:
                self.writing(slot)
            pause = random.expovariate(1 / self.life.world.settings.read_seconds)
            self.process.after(pause, "read begins", lambda place=place: self._read(pull, place))

    def _stage(self, staging: Staging) -> None:
        self.stagings[staging.order.id] = staging
        random, world = self.life.loop.random, self.life.world
        slow = not world.calm and random.random() < 0.25
        pause = (
            random.uniform(*SLOW_SECONDS)
            if slow
            else random.expovariate(1 / self.life.world.settings.read_seconds)
        )
        place = staging.at
        source, target = staging.order.from_slots[place], staging.order.slots[place]
        seen = self.memory.changes[source]
        self.staging.write(target, GARBAGE)

        def copied() -> None:
            changed = self.memory.changes[source] - seen
            require(not changed, "what is staged stays as it is", f"slot {source} of {self.life} was written")
            fault = ItemFault.CANCELLED if staging.cancelled else None
            if fault is None and self.life.clock() >= staging.deadline:
                fault = ItemFault.TIMEOUT
            if fault is None and not world.calm and self.life.loop.chance(0.04):
                fault = ItemFault.FAILED
            if fault is None:
                self.staging.write(target, self.memory.cells[source])
                world.saw("staged")
            else:
                staging.faults[place] = fault
                world.saw(f"staging: {fault.value}")
            staging.at += 1
            if staging.at < len(staging.order.slots):
                self._stage(staging)
                return
            del self.stagings[staging.order.id]
            faults = {place: fault.value for place, fault in staging.faults.items()}
            self._tell(OrderDone(rank=self.rank, epoch=1, id=staging.order.id, faults=faults))

        self.process.after(pause, "staged", copied)

    def _why_not(self, pull: Pull) -> ItemFault | None:
        """What keeps this rank from reading for an order."""
        epoch, _ = self.met.get(pull.order.peer, (b"", None))
        if pull.cancelled:
            return ItemFault.CANCELLED
        if epoch != pull.order.epoch:
            return ItemFault.GONE
        if self.life.clock() >= pull.order.deadline:
            return ItemFault.TIMEOUT
        return None

    def _read(self, pull: Pull, place: int) -> None:
        world, loop = self.life.world, self.life.loop
        fault = self._why_not(pull)
        if fault is None and not world.calm and loop.chance(0.04):
            loop.fault("failed read")
            fault = ItemFault.FAILED
        if fault is not None:
            self._ended(pull, place, fault)
            return
        _, holder = self.met[pull.order.peer]
        there = holder.workers[self.rank]
        if not there.process.alive:
            self._ended(pull, place, ItemFault.FAILED)
            return
        self._is_lent(pull, place, holder)
        if pull.told is None:
            self.memory.write(pull.order.slots[place], GARBAGE)
        seen = there.lends_from(pull.order).changes[pull.order.from_slots[place]]
        pause = loop.random.expovariate(1 / self.life.world.settings.read_seconds)
        if not world.calm and loop.chance(0.25):
            loop.fault("slow read")
            pause = loop.random.uniform(*SLOW_SECONDS)
        left = self.life.until(pull.order.deadline)
        stops = self.process.stops

        def ends() -> None:
            if self._why_not(pull) is ItemFault.TIMEOUT and self.process.stops == stops:
                # Until then it may have read.
                self._is_lent(pull, place, holder)
            self._has_read(pull, place, holder, seen)

        self.process.after(min(pause, left), "read ends", ends)

    def _has_read(self, pull: Pull, place: int, holder: Life, seen: int) -> None:
        """Bytes have come, or time is over. A process that stood still in between may have read anything,
        and finds its deadline over."""
        world = self.life.world
        there = holder.workers[self.rank]
        fault = self._why_not(pull)
        if fault is None and not there.process.alive:
            fault = ItemFault.FAILED
        if fault is None and there.process.stands and not world.one_sided:
            # Its peer has to answer.
            left = self.life.until(pull.order.deadline)
            again = min(0.1, left)
            self.process.after(again, "read ends", lambda: self._has_read(pull, place, holder, seen))
            return
        if fault is None:
            source = pull.order.from_slots[place]
            self._is_lent(pull, place, holder)
            changed = there.lends_from(pull.order).changes[source] - seen
            require(not changed, "what a peer reads stays as it is", f"slot {source} of {holder} was written")
            if pull.told is None:
                self.memory.write(pull.order.slots[place], there.lends_from(pull.order).cells[source])
            world.saw("read" if pull.told is None else "read into blocks")
        else:
            world.saw(f"read: {fault.value}")
        self._ended(pull, place, fault)

    def lends_from(self, order: PullChunks) -> Memory:
        """What a peer's order reads here."""
        return self.staging if order.region == STAGING else self.memory

    def _is_lent(self, pull: Pull, place: int, holder: Life) -> None:
        """Within the time of an order its peer has a lease of ours on what it names."""
        order = pull.order
        if not holder.process.alive:
            return
        slot, digest = order.from_slots[place], order.digests[place]
        lent = holder.lends(self.life.id, order.region, slot, digest)
        require(lent, "peers read inside of leases", f"{self.life} reads slot {slot} of {holder}")
        there = holder.workers[self.rank].lends_from(order).cells[slot]
        right = there == cell(digest, self.rank, pull.weights)
        require(right, "a lent slot has its chunk", f"slot {slot} of {holder}, rank {self.rank}")

    def _ended(self, pull: Pull, place: int, fault: ItemFault | None) -> None:
        if pull.told is None:
            self.wrote(pull.order.slots[place])
        if fault is not None:
            pull.faults[place] = fault
        pull.left -= 1
        if pull.left:
            return
        del self.pulls[pull.order.id]
        if pull.told is not None:
            told = pull.told
            self.life.process.after(0.001, "result", lambda: told(self.rank, pull.faults))
            return
        faults = {place: fault.value for place, fault in pull.faults.items()}
        reason = "simulated" if faults else ""
        self._tell(OrderDone(rank=self.rank, epoch=1, id=pull.order.id, faults=faults, reason=reason))

    # Slots that are being written

    def writing(self, slot: int) -> None:
        self.written[slot] = self.written.get(slot, 0) + 1

    def wrote(self, slot: int) -> None:
        self.written[slot] -= 1
        if not self.written[slot]:
            del self.written[slot]


CHANNEL_BYTES = 64
