"""Ranks with an arena and a way to peers, for tests: what they hear, and what their bytes have to be."""

from __future__ import annotations

import ctypes
import os
import random
import threading
import time
from collections.abc import Callable, Collection, Sequence

from attrs import define, field

from kvferry.api import (
    Channel,
    Connection,
    ErrorKind,
    KVFerryError,
    Region,
    RemoteOp,
    Ticket,
    TransferStatus,
)
from kvferry.control.orders import ItemFault
from kvferry.data.engine_side import EngineSide
from kvferry.data.peer_side import PeerSide
from kvferry.data.wire import Cancel, CloseChannel, ForgetPeer, MeetPeer, OpenChannel, PullChunks
from kvferry.testing.channels import ForwardingChannel
from kvferry.testing.fake_instance import wait_until
from kvferry.testing.fake_memory import FakeGroup, FakeMemory
from kvferry.testing.faults import FaultPlan
from kvferry.testing.faulty_channel import FaultyChannel
from kvferry.testing.guarded import GuardedMemory, side_memory
from kvferry.testing.memory_channel import MemoryChannel, MemoryChannelOptions, MemoryNetwork

BLOCK_TOKENS = 4
CHUNK_TOKENS = 16
LONG = 20.0
"""Seconds that no test waits for unless something hangs."""

Want = tuple[int, int, int]
"""Tokens of a chunk, the peer's slot, and ours."""


class _Short(ForwardingChannel):
    """Takes no more operations in one call than it claims to take."""

    def __init__(self, inner: Channel, most: int | None) -> None:
        super().__init__(inner)
        self._most = most

    def read(
        self, connection: Connection, operations: Sequence[RemoteOp], deadline: float
    ) -> Ticket[TransferStatus]:
        if self._most is not None and len(operations) > self._most:
            raise KVFerryError(f"{len(operations)} operations at once", kind=ErrorKind.CAPACITY)
        return super().read(connection, operations, deadline)


@define(eq=False)
class Rank:
    """One rank with an arena of ``slots`` slots, between bytes that nobody may touch.

    Its memory has to look as if each pull that ended well had copied just its chunks. Where one failed, the
    bytes of its chunks may be anything, but from then on they stay. Channels meet the faults of ``plan``.
    """

    network: MemoryNetwork
    name: str = "near"
    groups: Sequence[FakeGroup] = (FakeGroup(),)
    rank: int = 0
    world_size: int = 1
    slots: int = 8
    alignment: int = 1
    chunk_tokens: int = CHUNK_TOKENS
    plan: FaultPlan = field(factory=FaultPlan)
    sleep: Callable[[float], None] = time.sleep
    retry_seconds: float = 0.02
    max_ops: int | None = None
    wrap: Callable[[Channel], Channel] = lambda channel: channel
    before_filled: Callable[[], object] = lambda: None
    engine: EngineSide = field(init=False)
    region: Region = field(init=False)
    side: PeerSide = field(init=False)
    epoch: bytes = b""
    export: bytes = b""
    channels: list[FaultyChannel] = field(factory=list)
    done_pulls: dict[int, tuple[dict[int, ItemFault], str]] = field(factory=dict)
    told: list[str] = field(factory=list)
    """What the listener was told against its contract."""
    opened: list[bytes] = field(factory=list)
    closed: list[tuple[bytes, str]] = field(factory=list)
    _memory: GuardedMemory = field(init=False)
    _expected: bytearray = field(init=False)
    _pulls: dict[int, tuple[Rank, list[Want]]] = field(factory=dict)
    _filled: list[int] = field(factory=list)
    _lock: threading.Lock = field(factory=threading.Lock)

    def __attrs_post_init__(self) -> None:
        memory = FakeMemory(self.groups, blocks=2, block_tokens=BLOCK_TOKENS)
        self.engine = EngineSide(memory.engine_groups(), self.chunk_tokens, self.alignment)
        chance = random.Random(self.name)
        length = self.slots * self.slot_bytes + self.slot_bytes // 2  # the last slot is not whole
        self._expected = bytearray(chance.randbytes(length))
        self._memory = side_memory(length + 65536, len(self.name))
        span = self._memory.take(bytes(self._expected))
        self.region = Region(
            name="first",
            address=self._memory.region.address + span.offset,
            length=length,
            keep_alive=self._memory,
        )
        self.side = PeerSide(
            "memory",
            self._make_channel,
            self.engine,
            self.chunk_tokens,
            rank=self.rank,
            world_size=self.world_size,
            retry_seconds=self.retry_seconds,
            max_ops=self.max_ops,
        )
        self.side.start(self.region, self)

    @property
    def slot_bytes(self) -> int:
        return self.engine.layout.total_bytes

    def _make_channel(self) -> Channel:
        inner = MemoryChannel(MemoryChannelOptions(network=self.network))
        self.channels.append(FaultyChannel(inner, self.plan, sleep=self.sleep))
        return self.wrap(_Short(self.channels[-1], self.max_ops))

    # -- what a scheduler does -------------------------------------------------------------------

    def open(self) -> Rank:
        self.epoch = os.urandom(16)
        self.side.take(OpenChannel(self.name, self.epoch))
        wait_until(lambda: self.epoch in self.opened, LONG, "a channel that was not opened")
        return self

    def close(self) -> None:
        self.side.take(CloseChannel(self.epoch))
        wait_until(lambda: (self.epoch, "") in self.closed, LONG, "a channel that was not closed")

    def meet(self, peer: Rank) -> None:
        self.side.take(MeetPeer(peer.name, peer.epoch, peer.export))

    def forget(self, peer: Rank) -> None:
        self.side.take(ForgetPeer(peer.name, peer.epoch))

    def expect(self, number: int, peer: Rank, wanted: Sequence[Want]) -> None:
        """What is read under this number."""
        self._pulls[number] = peer, list(wanted)

    def pull(self, number: int, peer: Rank, wanted: Sequence[Want], seconds: float = LONG) -> None:
        self.expect(number, peer, wanted)
        self.side.take(
            PullChunks(
                id=number,
                peer=peer.name,
                epoch=peer.epoch,
                digests=tuple(bytes(32) for _ in wanted),
                tokens=tuple(tokens for tokens, _, _ in wanted),
                from_slots=tuple(source for _, source, _ in wanted),
                slots=tuple(target for _, _, target in wanted),
                deadline=time.monotonic() + seconds,
            )
        )

    def cancel(self, number: int) -> None:
        self.side.take(Cancel(number, ""))

    def ended(self, number: int) -> dict[int, ItemFault]:
        """Wait for the end of a pull; what failed."""
        wait_until(lambda: number in self.done_pulls, LONG, f"pull {number} without an end")
        return self.done_pulls[number][0]

    def settled_faults(self, number: int) -> set[ItemFault]:
        """Wait for the end of a pull of which every chunk fails; as what."""
        faults = self.ended(number)
        assert set(faults) == set(range(len(self._pulls[number][1])))
        return set(faults.values())

    # -- what it hears ---------------------------------------------------------------------------

    def channel_opened(self, epoch: bytes, export: bytes, shard: bytes, slot_bytes: int) -> None:
        assert (shard, slot_bytes) == (self.engine.shard(self.rank, self.world_size), self.slot_bytes)
        self.export = export
        self.opened.append(epoch)

    def channel_closed(self, epoch: bytes, reason: str) -> None:
        under_way = set(self._pulls) - set(self.done_pulls)
        if under_way and not reason:
            self.told.append(f"the channel is closed, and pulls {under_way} have not ended")
        self.closed.append((epoch, reason))

    def filled(self, slots: Collection[int]) -> None:
        self.before_filled()
        with self._lock:
            self._filled += slots

    def done(self, order: int, faults: dict[int, ItemFault], reason: str) -> None:
        with self._lock:
            if order in self.done_pulls:
                self.told.append(f"pull {order} ended twice")
            if faults and not reason:
                self.told.append(f"pull {order} failed without a reason")
            peer, wanted = self._pulls[order]
            for place, (tokens, source, target) in enumerate(wanted):
                if (place in faults) == (target in self._filled):
                    self.told.append(f"place {place} of pull {order} is both filled and failed, or neither")
                if target in self._filled:
                    self._filled.remove(target)
                self._settle(peer, tokens, source, target, failed=place in faults)
            self.done_pulls[order] = faults, reason

    def _settle(self, peer: Rank, tokens: int, source: int, target: int, *, failed: bool) -> None:
        size = self.engine.layout.value_bytes(tokens, self.chunk_tokens)
        here, there = target * self.slot_bytes, source * self.slot_bytes
        if not failed:
            self._expected[here : here + size] = peer._expected[there : there + size]
        elif 0 < tokens <= self.chunk_tokens and 0 <= target < self.slots:
            self._expected[here : here + size] = self.bytes[here : here + size]

    # -- what has to be --------------------------------------------------------------------------

    @property
    def bytes(self) -> bytes:
        return ctypes.string_at(self.region.address, self.region.length)

    def under_way(self) -> set[int]:
        return set(self._pulls) - set(self.done_pulls)

    def check(self) -> None:
        """Nothing was told twice, and every byte is what it has to be."""
        assert self.told == []
        assert self._filled == []
        wrong = [at for at, (is_, be) in enumerate(zip(self.bytes, self._expected, strict=True)) if is_ != be]
        assert not wrong, f"{len(wrong)} bytes are wrong, from byte {wrong[0] % self.slot_bytes} of slot " + (
            f"{wrong[0] // self.slot_bytes} on"
        )
        assert self._memory.trespasses() == []

    def stop(self) -> None:
        assert self.side.stop(LONG), "the channel did not end"
        assert self.under_way() == set()
        self.check()
