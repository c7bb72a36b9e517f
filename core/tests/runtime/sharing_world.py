"""Fake engines that share over a network in memory."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from kvferry.api import Channel, ChunkKey, PeerId
from kvferry.testing.fake_engine import EngineSettings
from kvferry.testing.fake_instance import (
    FakeInstance,
    InstanceSettings,
    LowerFake,
    SharingFake,
    open_fake_instance,
    wait_until,
)
from kvferry.testing.faults import Fault, FaultPlan
from kvferry.testing.faulty_channel import FaultyChannel
from kvferry.testing.keyed_backends import Record, ShelfBackend
from kvferry.testing.memory_carrier import MemoryCarrier, PeerNetwork
from kvferry.testing.memory_channel import MemoryNetwork, make_memory_channels

CHUNK = 16
PATIENCE = 10.0
POLL_SECONDS = 0.005
BIG = 1 << 30


def prompt(number: int, tokens: int = 4 * CHUNK + 3) -> list[int]:
    return [1000 * number + token for token in range(tokens)]


class World:
    """Instances in one network. What a tier below the first holds lies in ``shelf``. ``settings`` of
    :meth:`open` are fields of :class:`kvferry.control.loans.BorrowSettings`."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self.stack = stack
        self.network = PeerNetwork()
        self.channels = MemoryNetwork()

    def beside(self, stack: ExitStack) -> World:
        """The same network, for instances that end with ``stack``."""
        other = World(self.folder, stack)
        other.network, other.channels = self.network, self.channels
        return other

    def open(
        self,
        name: str,
        *,
        world_size: int = 1,
        slots: int = 64,
        keep: bool = True,
        buffer_slots: int = 4,
        clock: Callable[[], float] = time.monotonic,
        shelf: dict[ChunkKey, Record] | None = None,
        faults: Sequence[Fault] = (),
        **settings: Any,
    ) -> FakeInstance:
        make_channel = make_memory_channels(self.channels)
        sharing = SharingFake(
            id=PeerId(name, os.urandom(16)),
            carrier=MemoryCarrier(self.network),
            make_channel=lambda: self._faulty(make_channel(), faults) if faults else make_channel(),
            settings=settings,
            keep=keep,
            buffer_slots=buffer_slots,
        )
        made = InstanceSettings(
            engine=EngineSettings(),
            world_size=world_size,
            slots=slots,
            engine_id=name,
            sharing=sharing,
            verify=True,
            clock=clock,
            lower=() if shelf is None else (LowerFake(make_backend=lambda _: ShelfBackend(shelf, BIG)),),
        )
        instance = self.stack.enter_context(open_fake_instance(self.folder, made))
        wait_until(lambda: sharing.id in self.network.members, PATIENCE, f"{name} never shared anything")
        return instance

    def _faulty(self, channel: Channel, faults: Sequence[Fault]) -> Channel:
        """It lets go of what it holds when that is due, on a thread of its own."""
        faulty = FaultyChannel(channel, FaultPlan(tuple(faults)))
        ended = threading.Event()

        def run() -> None:
            while not ended.wait(POLL_SECONDS):
                faulty.poll()

        thread = threading.Thread(target=run)
        thread.start()
        self.stack.callback(thread.join)
        self.stack.callback(ended.set)
        return faulty

    def settle(self, *instances: FakeInstance) -> None:
        for instance in instances:
            instance.settle_lower()
            sharing = instance.scheduler.sharing
            assert sharing is not None
            wait_until(lambda sharing=sharing: sharing.serving.leases == 0, PATIENCE, "leases of peers")  # type: ignore[misc]
            instance.check_idle()


def serve(instance: FakeInstance, tokens: list[int]) -> list[int]:
    """What the request hit, load by load. The engine compares every byte that it reads. Its peers have heard
    of all that it has, then."""
    request = instance.engine.add(tokens)
    instance.engine.run()
    instance.settle_told()
    return request.hits
