"""Instances around a fake engine, closed before the leak guard looks."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvferry.cli.host import Host
from kvferry.cli.main import main
from kvferry.data.plans import TransferResult
from kvferry.data.wire import WIRE_VERSION, Beat, Done, Hello, Ready
from kvferry.runtime.address import MeetingPlace
from kvferry.runtime.side_channel import SideChannelClient
from kvferry.testing.fake_engine import EngineSettings
from kvferry.testing.fake_instance import FakeInstance, InstanceSettings, LowerFake, open_fake_instance
from kvferry.testing.fake_memory import FakeGroup
from kvferry.testing.gated_backend import Disk, GatedBackend
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


@pytest.fixture
def live(folder: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Runs ``kvferry live``; the JSON that it printed, or its code and what it complained of."""

    def run(*words: str, text: bool = False) -> Any:
        host = Host(environment={"XDG_RUNTIME_DIR": str(folder)})
        code = main(["live", *words, *([] if text else ["--format", "json"])], host)
        out, err = capsys.readouterr()
        if code:
            return code, err
        return out if text else json.loads(out)

    return run


@pytest.fixture
def open_tiers(folder: Path, leak_guard: LeakGuard) -> Iterator[Any]:
    """``open_tiers(disk, ...)`` opens an instance with a tier over each disk, or over the disks of several
    ranks; settings go to each tier."""
    with ExitStack() as stack:

        def open_(
            *disks: Disk | Sequence[Disk],
            slots: int = 8,
            tiers: Sequence[dict[str, Any]] = (),
            groups: tuple[FakeGroup, ...] = (FakeGroup(),),
            events: int = 0,
            **settings: Any,
        ) -> FakeInstance:
            ranks = [disk if isinstance(disk, Sequence) else (disk,) for disk in disks]
            each = tiers or [{}] * len(disks)
            lower = tuple(
                LowerFake(
                    make_backend=lambda rank, disk=disk: GatedBackend(disk[rank]),
                    name=f"lower{index}",
                    chunks=more.pop("chunks", 256),
                    ttl=more.pop("ttl", None),
                    settings={"load_deadline": 30.0, **settings, **more},
                )
                for index, (disk, more) in enumerate(zip(ranks, map(dict, each), strict=True))
            )
            made = InstanceSettings(
                engine=EngineSettings(prefix_cache=False),
                groups=groups,
                slots=slots,
                world_size=len(ranks[0]),
                verify=True,
                lower=lower,
            )
            opened = open_fake_instance(
                folder, made, watch=leak_guard.watch, manager_options={"events": events} if events else None
            )
            return stack.enter_context(opened)

        yield open_
