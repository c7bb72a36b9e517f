"""A worker with a channel: orders come over its side channel, chunks from a peer, results go back."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
from attrs import define, field
from numpy.typing import NDArray

from kvferry.data.copy import NumpyCopier
from kvferry.data.engine_side import EngineSide
from kvferry.data.mapping import region_view
from kvferry.data.peer_side import PeerSide
from kvferry.data.store_side import StoreSide
from kvferry.data.wire import (
    Cancel,
    ChannelClosed,
    ChannelOpened,
    CloseChannel,
    ForgetPeer,
    FromWorker,
    Hello,
    MeetPeer,
    OpenChannel,
    OrderDone,
    PullChunks,
    Ready,
    WorkerOrder,
)
from kvferry.runtime import WorkerRuntime
from kvferry.runtime.address import MeetingPlace
from kvferry.runtime.side_channel import SideChannelServer
from kvferry.testing.backends import MemoryBackend, MemoryOptions
from kvferry.testing.fake_instance import wait_until
from kvferry.testing.fake_memory import FakeGroup, FakeMemory
from kvferry.testing.memory_channel import MemoryNetwork, make_memory_channels

CHUNK, SLOTS = 16, 8
LONG = 20.0
Message = TypeVar("Message")


@define
class Instance:
    """A worker with a channel, and the scheduler's end of its side channel."""

    name: str
    server: SideChannelServer
    worker: WorkerRuntime
    backend: MemoryBackend
    heard: list[FromWorker]
    epoch: bytes = field(factory=lambda: os.urandom(16))

    def post(self, order: WorkerOrder) -> None:
        self.server.post(0, order)

    def hear(self, kind: type[Message], count: int = 1) -> Message:
        """The ``count``-th message of a kind, once it is there."""

        def those() -> list[Message]:
            return [message for message in self.heard if isinstance(message, kind)]

        wait_until(lambda: len(those()) >= count, LONG, f"{count} messages {kind.__name__}")
        return those()[count - 1]

    def open(self) -> ChannelOpened:
        self.post(OpenChannel(self.name, self.epoch))
        return self.hear(ChannelOpened)

    @property
    def slots(self) -> NDArray[np.uint8]:
        """The arena, slot by slot."""
        return region_view(self.backend.opened()).reshape(SLOTS, -1)


OpenInstance = Callable[[str], Instance]


@pytest.fixture
def open_instance(folder: Path) -> Iterator[OpenInstance]:
    network = MemoryNetwork()
    with ExitStack() as stack:

        def opened(name: str) -> Instance:
            place = MeetingPlace(name, str(folder), {})
            heard: list[FromWorker] = []
            server = SideChannelServer(place.endpoint, place.claim(), heard.append, lambda: None)
            server.open()
            stack.callback(place.release)
            stack.callback(server.close)
            memory = FakeMemory([FakeGroup()], blocks=8, block_tokens=4)
            side = EngineSide(memory.engine_groups(), CHUNK)
            size = side.layout.total_bytes
            backend = MemoryBackend(MemoryOptions(), SLOTS * size)
            worker = WorkerRuntime(
                side,
                StoreSide("memory", backend, size, 0),
                NumpyCopier(),
                MeetingPlace(name, str(folder), {}),
                rank=0,
                world_size=1,
                epoch=len(name),
                fingerprint="fake",
                peers=PeerSide(
                    "memory",
                    make_memory_channels(network),
                    side,
                    CHUNK,
                    rank=0,
                    world_size=1,
                    retry_seconds=1.0,
                ),
            )
            worker.open()
            stack.callback(worker.close)
            instance = Instance(name, server, worker, backend, heard)
            instance.hear(Hello)
            instance.hear(Ready)
            return instance

        yield opened


def test_chunks_of_a_peer_come_into_the_first_tier(open_instance: OpenInstance) -> None:
    near, far = open_instance("near"), open_instance("far-away")
    said, own = far.open(), near.open()
    assert (said.rank, said.epoch, said.channel_epoch) == (0, len("far-away"), far.epoch)
    assert (said.shard, said.slot_bytes) == (own.shard, own.slot_bytes)
    assert said.slot_bytes == far.slots.shape[1]
    far.slots[:] = np.arange(1, SLOTS + 1, dtype=np.uint8)[:, None]
    near.slots[:] = 0
    near.post(MeetPeer(far.name, far.epoch, said.export))
    near.post(
        PullChunks(7, far.name, far.epoch, (b"a", b"b"), (16, 4), (6, 1), (0, 3), time.monotonic() + LONG)
    )
    assert near.hear(OrderDone) == OrderDone(0, len("near"), 7)
    expected = np.zeros_like(near.slots)
    expected[0] = 7
    expected[3, : said.slot_bytes // 4] = 2
    assert np.array_equal(near.slots, expected)
    statistics = near.worker.peer_statistics()
    assert statistics is not None
    assert statistics.read_bytes == said.slot_bytes * 5 // 4


def test_a_pull_that_fails_says_why_and_is_answered_once(open_instance: OpenInstance) -> None:
    near, far = open_instance("near"), open_instance("far-away")
    said = far.open()
    pull = PullChunks(1, far.name, far.epoch, (b"a",), (16,), (0,), (0,), time.monotonic() + LONG)
    near.post(pull)
    assert near.hear(OrderDone).faults == {0: "cancelled"}
    near.open()
    near.post(pull)
    done = near.hear(OrderDone, 2)
    assert done.faults == {0: "gone"}
    assert "not known" in done.reason
    near.post(MeetPeer(far.name, far.epoch, said.export))
    near.post(ForgetPeer(far.name, far.epoch))
    near.post(Cancel(1, ""))
    near.post(pull)
    assert near.hear(OrderDone, 3).faults == {0: "gone"}
    near.post(CloseChannel(near.epoch))
    assert near.hear(ChannelClosed) == ChannelClosed(0, len("near"), near.epoch, "")
    assert sum(isinstance(message, OrderDone) for message in near.heard) == 3
