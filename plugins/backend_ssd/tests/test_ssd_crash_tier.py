"""A whole instance over a disk that fails for a while: right answers throughout, and hits once it is back."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from attrs import define, field

from kvferry.api import Backend
from kvferry.testing.fake_engine import EngineSettings
from kvferry.testing.fake_instance import (
    FakeInstance,
    InstanceSettings,
    LowerFake,
    open_fake_instance,
    wait_until,
)
from kvferry_backend_ssd.backend import SSDBackend
from kvferry_backend_ssd.block_io import Purpose
from kvferry_backend_ssd.choice import choose_io
from kvferry_backend_ssd.options import IOPath, SSDOptions
from plugins.backend_ssd.tests.ssd_bench import MIB, FaultyIO

CHUNK = 16
PROMPTS = 6
HIT = [4 * CHUNK]


@define
class Disk:
    """Backends over one folder. While ``broken``, every call on the file ends with EIO."""

    path: Path
    io: IOPath
    broken: bool = False
    met: int = 0
    _lock: threading.Lock = field(factory=threading.Lock)

    def backend(self, rank: int) -> Backend:
        del rank
        real = choose_io(self.io, "lower")[1]
        options = SSDOptions(path=str(self.path), io=self.io)
        return SSDBackend(options, 4 * MIB, lambda depth: FaultyIO(real(depth), self._meet))

    def _meet(self, call: str, purpose: Purpose | None) -> int:
        del call, purpose
        if not self.broken:
            return 0
        with self._lock:
            self.met += 1
        return errno.EIO

    def instance(self) -> InstanceSettings:
        """With room for two prompts in memory."""
        lower = LowerFake(make_backend=self.backend, settings={"retry_after": 0.3})
        return InstanceSettings(
            engine=EngineSettings(prefix_cache=False), slots=8, verify=True, alignment=4096, lower=(lower,)
        )


def prompt(number: int) -> list[int]:
    return [1000 * number + token for token in range(4 * CHUNK + 3)]


def serve(instance: FakeInstance, number: int) -> list[int]:
    """What the request hit. The engine checks every byte that its answer was computed from."""
    request = instance.engine.add(prompt(number))
    instance.engine.run()
    instance.settle_saves()
    return request.hits


@pytest.fixture
def disk(quick_folder: Path, io_path: IOPath) -> Iterator[Disk]:
    found = Disk(quick_folder / "store", io_path)
    yield found
    found.broken = False


def test_a_disk_that_fails_for_a_while_costs_its_hits_and_no_answer(tmp_path: Path, disk: Disk) -> None:
    with open_fake_instance(tmp_path, disk.instance()) as instance:
        for number in range(PROMPTS):
            assert serve(instance, number) == []
            instance.settle_lower()
        (before,) = instance.scheduler.lower_tiers()
        assert before.stored == 4 * PROMPTS

        disk.broken = True
        for number in range(PROMPTS):
            serve(instance, number)  # whatever it hits, its answer is right
        wait_until(lambda: not instance.lower_open(), 10.0, "a broken tier that stays in use")
        (broken,) = instance.scheduler.lower_tiers()
        assert disk.met > 0
        assert broken.failures > before.failures
        assert "EIO" in broken.reason
        assert broken.chunks == 0, "keys of a tier that failed are not retracted"
        for number in range(PROMPTS, PROMPTS + 3):
            assert serve(instance, number) == []

        wait_until(
            lambda: instance.scheduler.lower_tiers()[0].failures > broken.failures, 10.0, "another try"
        )
        disk.broken = False
        wait_until(instance.lower_open, 10.0, "a tier that never opens again")
        (again,) = instance.scheduler.lower_tiers()
        assert again.openings > broken.openings
        assert again.adopted >= 4 * PROMPTS
        for number in range(PROMPTS):
            assert serve(instance, number) == HIT
        instance.settle_lower()
        (after,) = instance.scheduler.lower_tiers()
        assert after.corrupt == 0
        instance.check_idle()


def test_what_was_stored_before_a_restart_is_hit_after_it(tmp_path: Path, disk: Disk) -> None:
    for expected in ([], HIT):
        with open_fake_instance(tmp_path, disk.instance()) as instance:
            for number in range(PROMPTS):
                assert serve(instance, number) == expected
                instance.settle_lower()
            instance.check_idle()
