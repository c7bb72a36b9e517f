"""Tiers below the first, driven by both runtimes and a fake engine, over stores in memory."""

from __future__ import annotations

from pathlib import Path

from attrs import define, field

from kvferry.api import Backend, ChunkKey
from kvferry.config import StoreWhen
from kvferry.testing.fake_engine import EngineSettings
from kvferry.testing.fake_instance import FakeInstance, InstanceSettings, LowerFake, open_fake_instance
from kvferry.testing.keyed_backends import Record, ShelfBackend

BLOCK, CHUNK_BLOCKS = 4, 4
CHUNK = BLOCK * CHUNK_BLOCKS
BIG = 1 << 30


@define
class Shelves:
    """Stores of all ranks, which stay when an instance ends."""

    capacity: int = BIG
    ranks: dict[int, dict[ChunkKey, Record]] = field(factory=dict)

    def backend(self, rank: int) -> Backend:
        return ShelfBackend(self.ranks.setdefault(rank, {}), self.capacity)


def settings(shelves: Shelves, *, slots: int = 8, world_size: int = 1, **lower: object) -> InstanceSettings:
    return InstanceSettings(
        engine=EngineSettings(prefix_cache=False),
        slots=slots,
        world_size=world_size,
        verify=True,
        lower=(LowerFake(make_backend=shelves.backend, settings=lower),),
    )


def prompt(number: int, tokens: int = 4 * CHUNK + 3) -> list[int]:
    return [1000 * number + token for token in range(tokens)]


def serve(instance: FakeInstance, tokens: list[int]) -> list[int]:
    """What the request hit, load by load."""
    request = instance.engine.add(tokens)
    instance.engine.run()
    instance.settle_lower()
    return request.hits


def test_what_the_first_tier_lost_comes_back_from_the_second(tmp_path: Path) -> None:
    shelves = Shelves()
    with open_fake_instance(tmp_path, settings(shelves)) as instance:
        for number in range(4):
            assert serve(instance, prompt(number)) == []
        assert instance.manager.stats().evictions > 0
        for number in range(4):
            assert serve(instance, prompt(number)) == [4 * CHUNK]
        (report,) = instance.scheduler.lower_tiers()
        assert report.stored == 16
        assert report.fetched > 0
        assert report.failed_fetches == report.failed_stores == 0
        instance.check_idle()


def test_a_restart_finds_what_was_stored(tmp_path: Path) -> None:
    shelves = Shelves()
    with open_fake_instance(tmp_path, settings(shelves, world_size=2)) as instance:
        for number in range(4):
            serve(instance, prompt(number))
    with open_fake_instance(tmp_path, settings(shelves, world_size=2)) as instance:
        (report,) = instance.scheduler.lower_tiers()
        assert report.adopted == 16
        for number in range(4):
            assert serve(instance, prompt(number)) == [4 * CHUNK]
        instance.check_idle()


def test_write_on_evict_copies_what_is_about_to_go(tmp_path: Path) -> None:
    shelves = Shelves()
    with open_fake_instance(
        tmp_path, settings(shelves, slots=16, store=StoreWhen.WRITE_ON_EVICT)
    ) as instance:
        serve(instance, prompt(0))
        (report,) = instance.scheduler.lower_tiers()
        assert report.stored == 0
        for number in range(1, 8):
            serve(instance, prompt(number))
        for number in range(8):
            assert serve(instance, prompt(number)) == [4 * CHUNK]
        instance.check_idle()
