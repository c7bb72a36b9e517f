"""What is ordered into the staging lies there, and once an order has ended nobody writes it any more."""

from __future__ import annotations

import ctypes
import random
import threading
from collections.abc import Callable, Collection, Sequence

from attrs import define, field
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.api import (
    ErrorKind,
    ItemResult,
    KVFerryError,
    Region,
    StageCopy,
    Staging,
    StagingContext,
    Ticket,
    TransferStatus,
)
from kvferry.control.orders import ItemFault
from kvferry.data.engine_side import EngineSide
from kvferry.data.peer_side import PeerSide
from kvferry.data.staging_side import StagingSide
from kvferry.data.wire import Cancel, CloseChannel, OpenChannel, StageChunks
from kvferry.testing.channels import ForwardingChannel
from kvferry.testing.fake_instance import wait_until
from kvferry.testing.fake_memory import FakeGroup, FakeMemory
from kvferry.testing.memory_channel import MemoryChannel, MemoryChannelOptions, MemoryNetwork
from kvferry.testing.memory_staging import MemoryStaging, MemoryStagingOptions
from kvferry.testing.stagings import ForwardingStaging

CHUNK, BLOCK = 16, 4
SLOTS, STAGED = 8, 6
LONG = 20.0


@define(eq=False)
class Rank:
    """A first tier of ``SLOTS`` slots, and a staging of ``STAGED``."""

    groups: Sequence[FakeGroup] = (FakeGroup(),)
    alignment: int = 1
    before_piece: Callable[[], object] = lambda: None
    wrap: Callable[[Staging], Staging] = lambda staging: staging
    engine: EngineSide = field(init=False)
    region: Region = field(init=False)
    side: StagingSide = field(init=False)
    opened: list[Region] = field(factory=list)
    ended: dict[int, tuple[dict[int, ItemFault], str]] = field(factory=dict)
    told: list[str] = field(factory=list)
    """Events in their order, of channel and staging too."""
    wrong: list[str] = field(factory=list)
    """What it was told against the contract."""
    _content: bytes = b""

    def __attrs_post_init__(self) -> None:
        memory = FakeMemory(self.groups, blocks=2, block_tokens=BLOCK)
        self.engine = EngineSide(memory.engine_groups(), CHUNK, self.alignment)
        self._content = random.Random(0).randbytes(SLOTS * self.slot_bytes)
        buffer = ctypes.create_string_buffer(self._content, len(self._content))
        self.region = Region(
            name="first", address=ctypes.addressof(buffer), length=len(self._content), keep_alive=buffer
        )
        self.side = StagingSide(self._make, self.engine, CHUNK, rank=0, world_size=1)
        self.side.start(self.region, self)

    def _make(self) -> Staging:
        options = MemoryStagingOptions(before_piece=self.before_piece)
        rank = self

        class Told(ForwardingStaging):
            def open(self, context: StagingContext) -> Region:
                rank.opened.append(super().open(context))
                rank.told.append("staging opened")
                return rank.opened[-1]

            def close(self, deadline: float) -> None:
                rank.told.append("staging closed")
                super().close(deadline)

        return self.wrap(Told(MemoryStaging(options, STAGED * self.slot_bytes + 5)))

    @property
    def slot_bytes(self) -> int:
        return self.engine.layout.total_bytes

    def done(self, order: int, faults: dict[int, ItemFault], reason: str) -> None:
        if order in self.ended or bool(faults) != bool(reason):
            self.wrong.append(f"order {order}: {faults}, {reason!r}")
        self.ended[order] = faults, reason

    def stage(self, number: int, chunks: Sequence[tuple[int, int, int]]) -> None:
        """Chunks of so many tokens, out of one slot into another."""
        tokens, sources, targets = zip(*chunks, strict=True) if chunks else ((), (), ())
        self.side.stage(StageChunks(number, tokens, sources, targets, LONG))

    def faults(self, number: int) -> dict[int, ItemFault]:
        """Wait for the end of an order."""
        wait_until(lambda: number in self.ended, LONG, f"order {number} without an end")
        assert self.wrong == []
        return self.ended[number][0]

    def source(self, slot: int, tokens: int) -> bytes:
        start = slot * self.slot_bytes
        return self._content[start : start + self.engine.layout.value_bytes(tokens, CHUNK)]

    @property
    def staged(self) -> bytes:
        return ctypes.string_at(self.opened[-1].address, self.opened[-1].length)

    # What a peer side wants of its listener beside

    def filled(self, slots: Collection[int]) -> None:
        raise AssertionError("nothing comes into the first tier")

    def channel_opened(self, epoch: bytes, export: bytes, shard: bytes, slot_bytes: int) -> None:
        self.told.append("told that it is open")

    def channel_closed(self, epoch: bytes, reason: str) -> None:
        self.told.append(f"told that it is closed: {reason}" if reason else "told that it is closed")


CHUNKS = st.lists(
    st.tuples(st.sampled_from([4, 8, 12, 16, 16]), st.integers(0, SLOTS - 1), st.integers(0, STAGED - 1)),
    unique_by=lambda chunk: chunk[2],
    max_size=STAGED,
)


@settings(max_examples=40, deadline=None)
@given(
    groups=st.sampled_from([(FakeGroup(),), (FakeGroup(), FakeGroup())]),
    alignment=st.sampled_from([1, 4096]),
    orders=st.lists(CHUNKS, min_size=1, max_size=4),
)
def test_slots_hold_what_was_ordered_and_the_rest_stays(
    groups: tuple[FakeGroup, ...], alignment: int, orders: list[list[tuple[int, int, int]]]
) -> None:
    rank = Rank(groups, alignment)
    rank.side.open()
    try:
        expected = bytearray(rank.staged)
        for number, chunks in enumerate(orders):
            rank.stage(number, chunks)
            assert rank.faults(number) == {}
            for tokens, source, target in chunks:
                data = rank.source(source, tokens)
                at = target * rank.slot_bytes
                expected[at : at + len(data)] = data
        assert rank.staged == expected
    finally:
        rank.side.close()


def test_a_tail_of_one_group_moves_its_bytes_alone() -> None:
    rank = Rank()
    assert len(rank.source(0, 4)) * 4 == rank.slot_bytes


def test_an_order_that_is_cancelled_ends_when_nobody_writes_any_more() -> None:
    passes, reached = threading.Semaphore(1), threading.Event()

    def before_piece() -> None:
        if not passes.acquire(blocking=False):
            reached.set()
            assert passes.acquire(timeout=LONG)

    rank = Rank(before_piece=before_piece)
    rank.side.open()
    try:
        rank.stage(1, [(16, slot, slot) for slot in range(4)])
        assert reached.wait(LONG)
        assert rank.side.cancel(1)
        assert not rank.side.cancel(2)
        assert rank.ended == {}, "its second copy is being made"
        passes.release()
        assert rank.faults(1) == {2: ItemFault.CANCELLED, 3: ItemFault.CANCELLED}
        ctypes.memset(rank.opened[-1].address, 0xC3, rank.opened[-1].length)
        passes.release(8)
        rank.stage(2, [(16, 0, 5)])
        assert rank.faults(2) == {}
        assert rank.staged[: 5 * rank.slot_bytes] == b"\xc3" * 5 * rank.slot_bytes
    finally:
        passes.release(8)
        rank.side.close()


def test_what_is_not_open_copies_nothing() -> None:
    rank = Rank()
    rank.stage(1, [(16, 0, 0)] * 2)
    assert rank.ended[1][0] == {0: ItemFault.CANCELLED, 1: ItemFault.CANCELLED}
    rank.side.open()
    rank.side.close()
    rank.side.close()
    rank.stage(2, [(16, 0, 0)])
    assert rank.ended[2][0] == {0: ItemFault.CANCELLED}


def test_closing_ends_what_is_under_way_and_each_once() -> None:
    gate = threading.Event()
    rank = Rank(before_piece=lambda: gate.wait(LONG))
    rank.side.open()
    for number in range(5):
        rank.stage(number, [(16, number, number)])
    timer = threading.Timer(0.05, gate.set)
    timer.start()
    rank.side.close()
    timer.join()
    assert set(rank.ended) == set(range(5)), "it is closed, and orders have not ended"
    assert rank.ended[4][0] == {0: ItemFault.CANCELLED}


def test_slots_that_do_not_exist_fail_and_the_others_are_copied() -> None:
    rank = Rank()
    rank.side.open()
    try:
        rank.stage(1, [(16, SLOTS, 0), (16, 0, 1), (16, 0, STAGED)])
        assert rank.faults(1) == {0: ItemFault.FAILED, 2: ItemFault.FAILED}
        assert rank.staged[rank.slot_bytes :].startswith(rank.source(0, 16))
    finally:
        rank.side.close()


class Refusing(ForwardingStaging):
    def stage(self, copies: Sequence[StageCopy], deadline: float) -> Ticket[TransferStatus]:
        raise RuntimeError("not today")


def test_an_order_ends_whatever_a_staging_raises() -> None:
    rank = Rank(wrap=Refusing)
    rank.side.open()
    rank.stage(1, [(16, 0, 0)])
    assert rank.ended[1] == ({0: ItemFault.FAILED}, "not today")
    rank.side.close()


class Forgetful(ForwardingStaging):
    """Tells nobody what became of a batch when it closes, and then does."""

    forgotten: list[Ticket[TransferStatus]]

    def stage(self, copies: Sequence[StageCopy], deadline: float) -> Ticket[TransferStatus]:
        self.forgotten = [Ticket(len(copies))]
        return self.forgotten[0]


def test_an_order_that_a_staging_forgot_ends_with_it_and_once() -> None:
    made: list[Forgetful] = []

    def wrap(inner: Staging) -> Staging:
        made.append(Forgetful(inner))
        return made[-1]

    rank = Rank(wrap=wrap)
    rank.side.open()
    rank.stage(1, [(16, 0, 0)])
    rank.side.close()
    assert rank.ended[1][0] == {0: ItemFault.CANCELLED}
    made[0].forgotten[0].complete([ItemResult(TransferStatus.DONE)])
    assert rank.wrong == []


class Stubborn(ForwardingStaging):
    """Does not end the first time."""

    tries = 0

    def close(self, deadline: float) -> None:
        self.tries += 1
        if self.tries == 1:
            raise KVFerryError("a copy is under way", kind=ErrorKind.TIMEOUT)
        super().close(deadline)


def test_a_staging_that_does_not_end_is_closed_again() -> None:
    made: list[Stubborn] = []

    def wrap(inner: Staging) -> Staging:
        made.append(Stubborn(inner))
        return made[-1]

    rank = Rank(wrap=wrap)
    rank.side.open()
    rank.side.close()
    assert made[0].tries == 2


def peer_side(rank: Rank, refuses: str = "") -> PeerSide:
    class Told(ForwardingChannel):
        def register(self, region: Region) -> None:
            if refuses:
                raise KVFerryError(refuses, kind=ErrorKind.CAPACITY)
            rank.told.append(f"registered {region.name}")
            super().register(region)

        def close(self, deadline: float) -> None:
            super().close(deadline)
            rank.told.append("channel closed")

    options = MemoryChannelOptions(network=MemoryNetwork())
    side = PeerSide(
        "memory",
        lambda: Told(MemoryChannel(options)),
        rank.engine,
        CHUNK,
        rank=0,
        world_size=1,
        retry_seconds=1.0,
        staging=rank.side,
    )
    side.start(rank.region, rank)
    return side


def test_peers_are_shown_the_staging_in_place_of_the_tier_and_it_goes_after_the_channel() -> None:
    rank = Rank()
    side = peer_side(rank)
    for number in (1, 2):  # each opening has memory of its own
        epoch = bytes([number]) * 16
        side.take(OpenChannel("near", epoch))
        wait_until(lambda: "told that it is open" in rank.told, LONG, "a channel that was not opened")
        side.take(StageChunks(number, (16,), (0,), (1,), LONG))
        assert rank.faults(number) == {}
        side.take(Cancel(number, ""))
        side.take(CloseChannel(epoch))
        wait_until(lambda: "told that it is closed" in rank.told, LONG, "a channel that was not closed")
        assert rank.told == [
            "staging opened",
            "registered staging",
            "told that it is open",
            "channel closed",
            "staging closed",
            "told that it is closed",
        ]
        rank.told.clear()
    side.take(StageChunks(3, (16,), (0,), (1,), LONG))
    assert rank.faults(3) == {0: ItemFault.CANCELLED}
    assert side.stop(LONG)


def test_a_staging_that_cannot_be_opened_is_told_as_a_channel_that_is_closed() -> None:
    class Full(ForwardingStaging):
        def open(self, context: StagingContext) -> Region:
            raise KVFerryError("there is no memory", kind=ErrorKind.CAPACITY)

    rank = Rank(wrap=Full)
    side = peer_side(rank)
    side.take(OpenChannel("near", bytes(16)))
    wait_until(lambda: len(rank.told) == 2, LONG, "a channel that was neither opened nor refused")
    assert rank.told == ["channel closed", "told that it is closed: there is no memory"]
    assert side.stop(LONG)


def test_memory_that_cannot_be_registered_is_given_back() -> None:
    rank = Rank()
    side = peer_side(rank, refuses="20 GiB are registered")
    side.take(OpenChannel("near", bytes(16)))
    told = [
        "staging opened",
        "channel closed",
        "staging closed",
        "told that it is closed: 20 GiB are registered",
    ]
    wait_until(lambda: len(rank.told) == len(told), LONG, "a channel that was neither opened nor refused")
    assert rank.told == told
    assert side.stop(LONG)
