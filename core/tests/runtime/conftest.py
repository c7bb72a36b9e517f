"""Instances around a fake engine, closed before the leak guard looks."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvferry.data.plans import TransferResult
from kvferry.data.wire import WIRE_VERSION, Beat, Done, Hello, Ready
from kvferry.runtime.address import MeetingPlace
from kvferry.runtime.side_channel import SideChannelClient
from kvferry.testing.fake_instance import FakeInstance, InstanceSettings, open_fake_instance
from kvferry.testing.leaks import LeakGuard

OpenInstance = Callable[..., FakeInstance]
FINGERPRINT = "fake"


class RawWorker:
    """A worker's end of the side channel without a data plane behind it."""

    def __init__(self, place: MeetingPlace, *, epoch: int = 7, **hello: Any) -> None:
        self.refusals: list[str] = []
        self.rank = hello.get("rank", 0)
        self.epoch = epoch
        self._hello = {
            "version": WIRE_VERSION,
            "rank": 0,
            "world_size": 1,
            "epoch": epoch,
            "fingerprint": FINGERPRINT,
            "slots": 64,
            "slot_bytes": 1,
            **hello,
        }
        self.client = SideChannelClient(
            place.endpoint,
            f"{self.rank}-{epoch}",
            place.read_token,
            self.make_hello,
            lambda: Beat(rank=self.rank, epoch=epoch),
            self.refusals.append,
        )

    def make_hello(self, token: str) -> Hello:
        return Hello(**{"token": token, **self._hello})

    def ready(self, slots: int = 64) -> None:
        self.client.send(Ready(rank=self.rank, epoch=self.epoch, slots=slots))

    def done(self, *results: TransferResult) -> None:
        self.client.send(Done(rank=self.rank, epoch=self.epoch, results=results))


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a path short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="kf") as name:
        yield Path(name)


@pytest.fixture
def open_instance(folder: Path, leak_guard: LeakGuard) -> Iterator[OpenInstance]:
    """Opens an instance with the given settings until the end of the test."""
    with ExitStack() as stack:

        def open_(settings: InstanceSettings | None = None, **more: Any) -> FakeInstance:
            opened = open_fake_instance(folder, settings, watch=leak_guard.watch, **more)
            return stack.enter_context(opened)

        yield open_


@pytest.fixture
def raw_worker() -> Iterator[Callable[..., RawWorker]]:
    """Opens workers without a data plane until the end of the test."""
    with ExitStack() as stack:

        def open_(place: MeetingPlace, **more: Any) -> RawWorker:
            worker = RawWorker(place, **more)
            worker.client.open()
            stack.callback(worker.client.close)
            return worker

        yield open_
