"""A worker with a channel, as a configuration opens it, and the scheduler's end of its side channel.

Run as ``python -m tests.peers.peer_worker`` it is a peer: it fills its engine's pages, saves them into slots
of its first tier, tells how it can be reached, and serves until its standard input ends.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

import numpy as np
from attrs import define, field
from numpy.typing import NDArray

from kvferry.api import HostEnvironment, Region
from kvferry.config import ConfigSources
from kvferry.data.engine_side import EngineSide
from kvferry.data.mapping import region_view
from kvferry.data.plans import Direction, StepPlan, Transfer
from kvferry.data.wire import ChannelOpened, Done, FromWorker, OpenChannel, Ready, WorkerOrder
from kvferry.runtime import EngineDescription, SavingOptions, WorkerRuntime, open_worker, prepare
from kvferry.runtime.address import MeetingPlace
from kvferry.runtime.side_channel import SideChannelServer
from kvferry.testing.fake_instance import wait_until
from kvferry.testing.fake_memory import FakeGroup, FakeMemory

CONFIG = """
plugins: [backend_cpu, transport_{channel}]
chunk_tokens: {chunk}
runtime_dir: {folder}
instance: {name}
tiers:
  memory: {{use: cpu, capacity: 256KiB}}
channel:
  use: {channel}
"""
BLOCK, BLOCKS_PER_CHUNK, BLOCKS = 4, 4, 32
CHUNK = BLOCK * BLOCKS_PER_CHUNK
LONG = 30.0
Message = TypeVar("Message")


def bytes_of(seed: int, length: int) -> NDArray[np.uint8]:
    """What a peer that was started with ``seed`` has in its engine's pages."""
    return np.frombuffer(random.Random(seed).randbytes(length), np.uint8)


@define
class PeerWorker:
    """One rank of an instance of one rank."""

    name: str
    worker: WorkerRuntime
    server: SideChannelServer
    heard: list[FromWorker]
    memory: FakeMemory
    region: Region
    epoch: bytes = field(factory=lambda: os.urandom(16))
    _transfers: int = 0

    @property
    def pages(self) -> NDArray[np.uint8]:
        """The engine's memory, block by block."""
        return region_view(self.region).reshape(BLOCKS, -1)

    def post(self, order: WorkerOrder) -> None:
        self.server.post(0, order)

    def hear(self, kind: type[Message], count: int = 1) -> Message:
        """The ``count``-th message of a kind, once it is there."""

        def those() -> list[Message]:
            return [message for message in self.heard if isinstance(message, kind)]

        wait_until(lambda: len(those()) >= count, LONG, f"{count} messages {kind.__name__}")
        return those()[count - 1]

    def open_channel(self) -> ChannelOpened:
        self.post(OpenChannel(self.name, self.epoch))
        return self.hear(ChannelOpened)

    def copy(self, direction: Direction, slot: int, blocks: list[int]) -> None:
        """Between a slot and blocks of the engine, to the end."""
        self._transfers += 1
        places = range(len(blocks))
        transfer = Transfer.of(self._transfers, "r", direction, [slot] * len(blocks), places, [blocks])
        if direction is Direction.SAVE:
            self.worker.submit_saves(StepPlan(saves=(transfer,)), 0)
        else:
            self.worker.start_loads(StepPlan(loads=(transfer,)))
        assert not self.hear(Done, self._transfers).results[0].failed_slots


@contextmanager
def open_peer_worker(channel: str, name: str, folder: Path) -> Iterator[PeerWorker]:
    """A worker whose channel is not open yet; sockets lie in ``folder``, whose path is short."""
    file = folder / f"{name}.yaml"
    file.write_text(CONFIG.format(channel=channel, chunk=CHUNK, folder=folder, name=name))
    prepared = prepare(ConfigSources(file=file, environment={}, overrides={}), HostEnvironment(variables={}))
    memory = FakeMemory([FakeGroup(head_bytes=32)], blocks=BLOCKS, block_tokens=BLOCK)
    groups = memory.engine_groups()
    (region,) = EngineSide([groups[0]], CHUNK).regions()[:1]
    description = EngineDescription(
        engine_id=name,
        world_size=1,
        groups=memory.shapes,
        block_bytes=tuple(group.block_bytes for group in groups),
    )
    heard: list[FromWorker] = []
    place = MeetingPlace(name, str(folder), {})
    with ExitStack() as stack:
        server = SideChannelServer(place.endpoint, place.claim(), heard.append, lambda: None)
        server.open()
        stack.callback(place.release)
        stack.callback(server.close)
        worker = open_worker(
            prepared.config, prepared.plugins, description, SavingOptions(), {}, rank=0, groups=groups
        )
        stack.callback(worker.close)
        made = PeerWorker(name, worker, server, heard, memory, region)
        wait_until(
            lambda: any(isinstance(each, Ready) and each.slots for each in heard),
            LONG,
            "a tier that is ready",
        )
        yield made


def main(channel: str, name: str, seed: int) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="kf") as folder,
        open_peer_worker(channel, name, Path(folder)) as peer,
    ):
        opened = peer.open_channel()
        peer.pages[:] = bytes_of(seed, peer.pages.size).reshape(BLOCKS, -1)
        for slot in range(BLOCKS // BLOCKS_PER_CHUNK):
            first = slot * BLOCKS_PER_CHUNK
            peer.copy(Direction.SAVE, slot, list(range(first, first + BLOCKS_PER_CHUNK)))
        print(json.dumps({"epoch": peer.epoch.hex(), "export": opened.export.hex()}), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
