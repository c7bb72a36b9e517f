"""Tiers below the first that fail, lose chunks, are cleared, and are opened again."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from kvferry.api import ChunkKey
from kvferry.runtime import RequestOptions
from kvferry.runtime.events import ForgetAll, RemovedChunks, StoredRun
from kvferry.testing.fake_engine import EngineSettings
from kvferry.testing.fake_instance import (
    FakeInstance,
    InstanceSettings,
    LowerFake,
    open_fake_instance,
    wait_until,
)
from kvferry.testing.fake_memory import FakeGroup
from kvferry.testing.gated_backend import Disk, GatedBackend

CHUNK = 16


def prompt(number: int, tokens: int = 4 * CHUNK + 3) -> list[int]:
    return [1000 * number + token for token in range(tokens)]


def serve(instance: FakeInstance, tokens: list[int], *, new_tokens: int = 1, **options: Any) -> list[int]:
    """What the request hit, load by load."""
    request = instance.engine.add(tokens, new_tokens=new_tokens, options=RequestOptions(**options))
    instance.engine.run()
    instance.settle_lower()
    assert request.complete
    return request.hits


def push_out(instance: FakeInstance) -> None:
    """Leave nothing of what was served in the first tier."""
    instance.manager.clear()


def report_of(instance: FakeInstance) -> Any:
    return instance.scheduler.lower_tiers()[0]


def break_(instance: FakeInstance, disk: Disk) -> None:
    """Let a disk fail until its tier is given up."""
    disk.broken = True
    number = 1000
    while report_of(instance).health == "open":
        number += 1
        serve(instance, prompt(number))
        assert number < 1100, "the tier is used for ever"


def repair(instance: FakeInstance, disk: Disk) -> None:
    disk.broken = False
    wait_until(instance.lower_open, 20.0, "the tier was not opened again")
    instance.settle_lower()


def test_a_failing_tier_costs_no_request_and_comes_back_with_its_chunks(open_tiers: Any) -> None:
    disk = Disk()
    instance = open_tiers(disk, retry_after=0.1)
    serve(instance, prompt(1))
    push_out(instance)
    break_(instance, disk)
    wait_until(lambda: report_of(instance).health == "paused", 10.0, "it was not closed")
    assert report_of(instance).chunks == 0
    assert "a test says so" in report_of(instance).reason
    assert serve(instance, prompt(1)) == []
    wait_until(lambda: len(disk.calls["open"]) > 2, 10.0, "it was never tried again")
    push_out(instance)
    repair(instance, disk)
    assert report_of(instance).failures > 1
    push_out(instance)
    assert serve(instance, prompt(1)) == [4 * CHUNK]
    instance.check_idle()


def test_a_stalled_tier_is_given_up_and_its_slots_come_back(open_tiers: Any) -> None:
    disk = Disk()
    instance = open_tiers(disk, load_deadline=0.1, retry_after=0.1)
    for number in range(3):
        serve(instance, prompt(number))
    push_out(instance)
    disk.held.add("read")
    for number in range(3):
        assert serve(instance, prompt(number)) == []
    disk.release()
    wait_until(instance.lower_open, 10.0, "the tier was not opened again")
    instance.settle_lower()
    instance.check_idle()
    push_out(instance)
    assert serve(instance, prompt(1)) == [4 * CHUNK]


def test_chunks_that_vanished_or_were_spoilt_are_computed(open_tiers: Any) -> None:
    disk = Disk()
    instance = open_tiers(disk)
    for number in (1, 2):
        serve(instance, prompt(number))
    push_out(instance)
    by_depth: dict[int, list[ChunkKey]] = {}
    for key, record in disk.records.items():
        by_depth.setdefault(record.header.depth, []).append(key)
    del disk.records[by_depth[2][0]]
    spoilt = disk.records[by_depth[1][1]]
    spoilt.value = bytes([spoilt.value[0] ^ 1]) + spoilt.value[1:]
    hits = [sum(serve(instance, prompt(number))) for number in (1, 2)]
    assert hits == [2 * CHUNK, CHUNK]
    assert report_of(instance).corrupt == 1
    push_out(instance)
    assert [sum(serve(instance, prompt(number))) for number in (1, 2)] == [4 * CHUNK, 4 * CHUNK]
    instance.check_idle()


def test_workers_that_end_leave_nothing_behind(open_tiers: Any) -> None:
    disk = Disk()
    instance = open_tiers(disk)
    serve(instance, prompt(1))
    push_out(instance)
    disk.held |= {"read", "write"}
    instance.engine.add(prompt(1))
    wait_until(lambda: disk.waiting > 0, 10.0, "no read")
    instance.workers[0].close()
    wait_until(lambda: not instance.scheduler.workers_ready(), 10.0, "nobody noticed")
    wait_until(instance.scheduler.lower_at_rest, 10.0, "something moves still")
    report = report_of(instance)
    assert (report.health, report.storing, report.fetching, report.chunks) == ("paused", 0, 0, 0)
    assert instance.manager.stats().reservations == 0


def test_a_clear_reaches_the_stores(open_tiers: Any) -> None:
    disk = Disk()
    instance = open_tiers(disk)
    for number in range(3):
        serve(instance, prompt(number))
    assert len(disk.records) == 12
    instance.engine.reset()
    instance.settle_lower()
    assert disk.records == {}
    assert serve(instance, prompt(1)) == []
    push_out(instance)
    assert serve(instance, prompt(1)) == [4 * CHUNK]
    instance.check_idle()


def test_a_clear_reaches_a_store_that_is_closed_at_the_time(open_tiers: Any) -> None:
    disk = Disk()
    instance = open_tiers(disk, retry_after=0.2)
    serve(instance, prompt(1))
    break_(instance, disk)
    assert disk.records
    instance.engine.reset()
    repair(instance, disk)
    assert disk.records == {}
    assert serve(instance, prompt(1)) == []
    push_out(instance)
    assert serve(instance, prompt(1)) == [4 * CHUNK]


def test_what_is_being_stored_during_a_clear_is_not_found(open_tiers: Any) -> None:
    disk = Disk()
    instance = open_tiers(disk, slots=32)
    disk.held.add("write")
    request = instance.engine.add(prompt(1))
    instance.engine.run()
    assert request.complete
    instance.settle_saves()
    wait_until(lambda: disk.waiting > 0, 10.0, "no write")
    instance.engine.reset()
    again = instance.engine.add(prompt(1))
    instance.engine.run()
    assert again.hits == []
    instance.settle_saves()
    disk.release()
    instance.settle_lower()
    push_out(instance)
    # The engine would tell bytes of the old weights from those of the new ones.
    serve(instance, prompt(1))
    serve(instance, prompt(1))
    instance.check_idle()


def test_deletions_that_fail_are_tried_again(open_tiers: Any) -> None:
    disk = Disk(failing={"delete"})
    instance = open_tiers(disk, slots=32, retry_after=0.1)
    serve(instance, prompt(1))
    instance.engine.reset()
    wait_until(lambda: len(disk.calls.get("delete", ())) > 1, 10.0, "it was not tried again")
    assert len(disk.records) == 4
    disk.failing.clear()
    wait_until(lambda: not disk.records, 10.0, "chunks of old weights stay for ever")
    wait_until(instance.lower_open, 10.0, "the tier was not opened again")
    assert serve(instance, prompt(1)) == []


def test_nothing_is_stored_where_room_could_not_be_made(open_tiers: Any) -> None:
    disk = Disk()
    instance = open_tiers(disk, slots=32, tiers=({"chunks": 4},), retry_after=0.1)
    serve(instance, prompt(1))
    held = set(disk.records)
    disk.failing.add("delete")
    request = instance.engine.add(prompt(2))
    instance.engine.run()
    assert request.complete
    wait_until(lambda: "delete" in disk.calls, 10.0, "nothing was to be deleted")
    wait_until(lambda: report_of(instance).failures > 0, 10.0, "nobody heard of it")
    assert disk.count("write") == 4
    assert set(disk.records) == held
    disk.failing.clear()
    wait_until(instance.lower_open, 10.0, "the tier was not opened again")
    serve(instance, prompt(3))
    assert len(disk.records) == 4
    push_out(instance)
    assert serve(instance, prompt(3)) == [4 * CHUNK]
    instance.check_idle()


Reopen = Callable[..., AbstractContextManager[FakeInstance]]


@pytest.fixture
def reopen(folder: Path) -> Reopen:
    """Opens instances one after the other over the same disks, one per rank."""

    def open_(*disks: Disk, chunks: int = 256, ttl: float | None = None, **more: Any) -> Any:
        lower = LowerFake(
            make_backend=lambda rank: GatedBackend(disks[rank]), name="lower", chunks=chunks, ttl=ttl
        )
        made = InstanceSettings(
            engine=EngineSettings(prefix_cache=False),
            slots=16,
            world_size=len(disks),
            verify=True,
            lower=(lower,),
            **more,
        )
        return open_fake_instance(folder, made)

    return open_


def test_a_time_to_live_goes_on_through_a_restart(reopen: Reopen) -> None:
    disk = Disk()
    with reopen(disk) as instance:
        serve(instance, prompt(1), ttl=0.6)
        serve(instance, prompt(2), ttl=1000.0)
        assert len(disk.records) == 8
        stored = time.monotonic()
    with reopen(disk) as instance:
        if time.monotonic() < stored + 0.3:
            assert instance.scheduler.lower_tiers()[0].adopted == 8
    time.sleep(max(0.0, stored + 0.6 - time.monotonic()))
    with reopen(disk) as instance:
        assert serve(instance, prompt(1)) == []
        assert serve(instance, prompt(2)) == [4 * CHUNK]


def test_a_tiers_own_time_to_live_goes_on_through_a_restart(reopen: Reopen) -> None:
    disk = Disk()
    with reopen(disk, ttl=0.5) as instance:
        serve(instance, prompt(1))
        assert len(disk.records) == 4
    time.sleep(0.5)
    with reopen(disk, ttl=0.5) as instance:
        instance.settle_lower()
        assert disk.records == {}
        assert serve(instance, prompt(1)) == []


def test_what_was_computed_with_new_weights_is_not_found_by_a_later_start(reopen: Reopen) -> None:
    disk = Disk()
    with reopen(disk) as instance:
        serve(instance, prompt(1))
        instance.engine.reset()
        instance.settle_lower()
        serve(instance, prompt(2))
        push_out(instance)
        assert serve(instance, prompt(2)) == [4 * CHUNK]
        assert len(disk.records) == 4
    with reopen(disk) as instance:
        # The engine has its old weights again, and computes.
        assert serve(instance, prompt(2)) == []
        report = report_of(instance)
        assert (report.adopted, report.foreign) == (0, 4)


def test_a_chunk_that_one_rank_lost_is_found_on_none(reopen: Reopen) -> None:
    disks = Disk(), Disk()
    with reopen(*disks) as instance:
        serve(instance, prompt(1))
    for key in [key for key, record in disks[1].records.items() if record.header.depth == 2]:
        del disks[1].records[key]
    with reopen(*disks) as instance:
        instance.settle_lower()
        assert instance.scheduler.lower_tiers()[0].adopted == 2
        assert [len(disk.records) for disk in disks] == [2, 2]
        assert serve(instance, prompt(1)) == [2 * CHUNK]
        assert [len(disk.records) for disk in disks] == [4, 4]
        push_out(instance)
        assert serve(instance, prompt(1)) == [4 * CHUNK]
        instance.check_idle()


def test_a_rank_whose_chunk_vanished_while_it_ran_makes_all_compute_it(reopen: Reopen) -> None:
    disks = Disk(), Disk()
    with reopen(*disks) as instance:
        serve(instance, prompt(1))
        push_out(instance)
        for key in [key for key, record in disks[1].records.items() if record.header.depth == 3]:
            del disks[1].records[key]
        assert serve(instance, prompt(1)) == [3 * CHUNK]
        assert [len(disk.records) for disk in disks] == [4, 4]


def test_a_smaller_tier_keeps_what_was_used_last(reopen: Reopen) -> None:
    disk = Disk()
    with reopen(disk) as instance:
        for number in (1, 2, 3):
            serve(instance, prompt(number))
        push_out(instance)
        serve(instance, prompt(1))
    with reopen(disk, chunks=8) as instance:
        instance.settle_lower()
        assert len(disk.records) == 8
        found = [sum(serve(instance, prompt(number))) for number in (1, 3, 2)]
        assert found == [4 * CHUNK, 4 * CHUNK, 0]


def test_chunks_of_another_model_make_room_first(reopen: Reopen) -> None:
    disk = Disk()
    with reopen(disk, namespace="another") as instance:
        for number in (1, 2):
            serve(instance, prompt(number))
    others = set(disk.records)
    with reopen(disk, chunks=10) as instance:
        assert instance.scheduler.lower_tiers()[0].foreign == 8
        assert serve(instance, prompt(1)) == []
        assert serve(instance, prompt(3)) == []
        assert len(others & set(disk.records)) == 2
        push_out(instance)
        assert serve(instance, prompt(1)) == [4 * CHUNK]
        assert instance.scheduler.lower_tiers()[0].chunks == 8


def test_what_a_window_left_behind_is_not_copied_down(open_tiers: Any) -> None:
    disk = Disk()
    groups = (FakeGroup(layers=1), FakeGroup(layers=1, window=9))
    instance = open_tiers(disk, slots=16, groups=groups)
    # Chunks of the answer are complete when the window has left their beginnings.
    serve(instance, prompt(1, 2 * CHUNK + 3), new_tokens=3 * CHUNK)
    assert instance.manager.stats().resident > 2
    assert sorted(record.header.depth for record in disk.records.values()) == [0, 1]
    push_out(instance)
    assert serve(instance, prompt(1, 2 * CHUNK + 3)) == [2 * CHUNK]
    assert serve(instance, prompt(1, CHUNK + 3)) == [CHUNK]
    instance.check_idle()


def test_listeners_hear_of_chunks_that_rose_with_what_they_hold(open_tiers: Any) -> None:
    disk = Disk()
    instance = open_tiers(disk, slots=6, events=200)
    known: dict[bytes, tuple[int, ...]] = {}
    for number in (1, 2, 1, 2, 1):
        serve(instance, prompt(number))
        while events := instance.scheduler.take_events():
            for event in events:
                match event:
                    case StoredRun():
                        before = event.parent
                        assert before is None or before in known
                        for key, content in zip(event.digests, event.contents, strict=True):
                            known[key] = tuple(content.token_ids)
                    case RemovedChunks():
                        for key in event.digests:
                            del known[key]
                    case ForgetAll():
                        known.clear()
        assert not instance.manager.events_behind
        told = set(known.values())
        assert {tuple(prompt(number)[at : at + CHUNK]) for at in range(0, 4 * CHUNK, CHUNK)} <= told
    assert report_of(instance).fetched > 0
