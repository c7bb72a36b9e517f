"""Requests that wait for tiers below the first: what they get, what they share, and when they stop."""

from __future__ import annotations

from typing import Any

from kvferry.config import StoreWhen
from kvferry.runtime import RequestOptions
from kvferry.testing.fake_instance import FakeInstance, InstanceSettings, wait_until
from kvferry.testing.fake_memory import FakeMemory
from kvferry.testing.fake_requests import FakeRequest, Status
from kvferry.testing.gated_backend import Disk

CHUNK = 16
LONG = 30.0


def prompt(number: int, tokens: int = 4 * CHUNK + 3) -> list[int]:
    return [1000 * number + token for token in range(tokens)]


def serve(instance: FakeInstance, tokens: list[int], **options: Any) -> list[int]:
    """What the request hit, load by load."""
    request = instance.engine.add(tokens, options=RequestOptions(**options))
    instance.engine.run()
    instance.settle_lower()
    return request.hits


def push_out(instance: FakeInstance) -> None:
    """Leave nothing of what was served in the first tier."""
    instance.manager.clear()
    assert instance.manager.stats().resident == 0


def add_stalled(instance: FakeInstance, disk: Disk, tokens: list[int]) -> FakeRequest:
    """A request whose chunks a disk holds back."""
    disk.held.add("read")
    request = instance.engine.add(tokens)
    wait_until(lambda: disk.waiting > 0, 10.0, "no read")
    return request


def test_the_engine_asks_again_later_while_chunks_come_up(open_tiers: Any) -> None:
    disk = Disk()
    instance = open_tiers(disk)
    serve(instance, prompt(1))
    push_out(instance)
    request = add_stalled(instance, disk, prompt(1))
    for _ in range(5):
        instance.engine.step()
        assert request.status is Status.WAITING
        assert request.computed == 0
    disk.release()
    instance.engine.run()
    assert request.hits == [4 * CHUNK]
    instance.settle_lower()
    instance.check_idle()


def test_others_run_while_a_request_waits(open_tiers: Any) -> None:
    disk = Disk()
    instance = open_tiers(disk)
    serve(instance, prompt(1))
    push_out(instance)
    request = add_stalled(instance, disk, prompt(1))
    other = instance.engine.add(prompt(2))
    for _ in range(50):
        instance.engine.step()
    assert other.complete
    assert request.status is Status.WAITING
    disk.release()
    instance.engine.run()
    assert request.hits == [4 * CHUNK]


def test_after_the_deadline_the_request_is_computed(open_tiers: Any) -> None:
    disk = Disk()
    instance = open_tiers(disk, load_deadline=0.15)
    serve(instance, prompt(1))
    push_out(instance)
    request = add_stalled(instance, disk, prompt(1))
    instance.engine.run(most_steps=10**6)
    assert request.complete
    assert request.hits == []
    wait_until(lambda: disk.cancelled > 0, 10.0, "nobody called the read off")
    instance.settle_lower()
    instance.check_idle()
    disk.release()
    assert serve(instance, prompt(1)) == [4 * CHUNK]


def test_requests_for_one_prefix_share_one_load(open_tiers: Any) -> None:
    disk = Disk()
    instance = open_tiers(disk, slots=32)
    serve(instance, prompt(1))
    push_out(instance)
    first = add_stalled(instance, disk, prompt(1))
    others = [instance.engine.add(prompt(1)), instance.engine.add(prompt(1, 3 * CHUNK + 5))]
    for _ in range(5):
        instance.engine.step()
    disk.release()
    instance.engine.run()
    assert [request.hits for request in (first, *others)] == [[4 * CHUNK], [4 * CHUNK], [3 * CHUNK + 4]]
    assert disk.count("read") == 4
    instance.settle_lower()
    instance.check_idle()


def test_a_shared_load_goes_on_when_one_of_its_requests_is_aborted(open_tiers: Any) -> None:
    disk = Disk()
    instance = open_tiers(disk, slots=32)
    serve(instance, prompt(1))
    push_out(instance)
    first = add_stalled(instance, disk, prompt(1))
    other = instance.engine.add(prompt(1))
    instance.engine.step()
    instance.engine.abort(first)
    instance.engine.step()
    disk.release()
    instance.engine.run()
    assert other.hits == [4 * CHUNK]
    assert disk.cancelled == 0
    assert disk.count("read") == 4


def test_the_abort_of_the_only_request_stops_the_load(open_tiers: Any) -> None:
    disk = Disk()
    instance = open_tiers(disk)
    serve(instance, prompt(1))
    push_out(instance)
    request = add_stalled(instance, disk, prompt(1))
    instance.engine.abort(request)
    wait_until(lambda: disk.cancelled > 0, 10.0, "nobody called the read off")
    instance.engine.run()
    instance.settle_lower()
    (report,) = instance.scheduler.lower_tiers()
    assert (report.fetching, report.fetched) == (0, 0)
    instance.check_idle()


def test_chunks_come_up_before_the_engine_asks(open_tiers: Any) -> None:
    disk = Disk()
    instance = open_tiers(disk)
    serve(instance, prompt(1))
    push_out(instance)
    steps = instance.engine.steps
    request = instance.engine.add(prompt(1))
    wait_until(lambda: instance.scheduler.lower_tiers()[0].fetched == 4, 10.0, "nothing came up")
    assert instance.engine.steps == steps
    instance.engine.run()
    assert request.hits == [4 * CHUNK]


def test_little_is_computed_and_much_is_loaded(open_tiers: Any) -> None:
    disk = Disk()
    instance = open_tiers(disk, min_load_tokens=3 * CHUNK)
    serve(instance, prompt(1))
    push_out(instance)
    assert serve(instance, prompt(1, 2 * CHUNK + 3)) == []
    assert disk.count("read") == 0
    push_out(instance)
    assert serve(instance, prompt(1)) == [4 * CHUNK]
    assert disk.count("read") == 4


def test_requests_are_not_kept_waiting_by_a_store_that_stalls(open_tiers: Any) -> None:
    disk = Disk(held={"write"})
    slot_bytes = _slot_bytes()
    instance = open_tiers(disk, slots=16, in_flight=4 * slot_bytes, store_deadline=LONG)
    for number in range(12):
        request = instance.engine.add(prompt(number))
        instance.engine.run(most_steps=200)
        assert request.complete
        instance.settle_saves()
    (report,) = instance.scheduler.lower_tiers()
    assert 0 < report.storing <= 4
    assert report.stored == 0
    assert instance.manager.stats().no_room == 0
    wait_until(lambda: instance.scheduler.lower_tiers()[0].skipped > 0, 10.0, "nothing was skipped")
    disk.release()
    instance.settle_lower()
    assert serve(instance, prompt(100)) == []
    push_out(instance)
    assert serve(instance, prompt(100)) == [4 * CHUNK]
    instance.check_idle()


def test_no_more_is_read_at_once_than_may_be(open_tiers: Any) -> None:
    disk = Disk()
    instance = open_tiers(disk, slots=40, in_flight=4 * _slot_bytes())
    for number in range(4):
        serve(instance, prompt(number))
    push_out(instance)
    disk.held.add("read")
    requests = [instance.engine.add(prompt(number)) for number in range(4)]
    wait_until(lambda: disk.waiting > 0, 10.0, "no read")
    for _ in range(20):
        instance.engine.step()
    assert instance.scheduler.lower_tiers()[0].fetching <= 4
    disk.release()
    instance.engine.run()
    assert [sum(request.hits) for request in requests] == [4 * CHUNK] * 4


def test_a_slow_tier_costs_only_its_own_hits(open_tiers: Any) -> None:
    fast, slow = Disk(), Disk()
    instance = open_tiers(fast, slow, slots=16, tiers=({}, {"load_deadline": 0.3}))
    for number in (1, 2):
        serve(instance, prompt(number))
    assert instance.scheduler._lower is not None
    instance.scheduler._lower.hierarchy.tier("lower0").index.drop(_keys(instance, 1)[2:3])
    push_out(instance)
    slow.held.add("read")
    stalled, other = instance.engine.add(prompt(1)), instance.engine.add(prompt(2))
    instance.engine.run(most_steps=10**6)
    assert stalled.hits == [2 * CHUNK]
    assert other.hits == [4 * CHUNK]
    slow.release()
    instance.settle_lower()
    instance.check_idle()


def test_a_prefix_may_lie_on_three_tiers(open_tiers: Any) -> None:
    near, far = Disk(), Disk()
    instance = open_tiers(near, far, slots=16)
    serve(instance, prompt(1, 6 * CHUNK + 3))
    # The first tier has two chunks, the next one four of them, the last one all.
    keys = _keys(instance, 1)
    instance.manager.drop(keys[2:3])
    assert instance.scheduler._lower is not None
    instance.scheduler._lower.hierarchy.tier("lower0").index.drop(keys[4:5])
    assert serve(instance, prompt(1, 6 * CHUNK + 3)) == [6 * CHUNK]
    assert (near.count("read"), far.count("read")) == (2, 2)


def test_writes_on_evict_bring_back_what_went(open_tiers: Any) -> None:
    disk = Disk()
    instance = open_tiers(disk, slots=16, store=StoreWhen.WRITE_ON_EVICT)
    for number in range(8):
        serve(instance, prompt(number))
    for number in range(8):
        assert serve(instance, prompt(number)) == [4 * CHUNK]
    instance.check_idle()


def test_a_client_may_do_without(open_tiers: Any) -> None:
    disk = Disk()
    instance = open_tiers(disk)
    serve(instance, prompt(1))
    push_out(instance)
    assert serve(instance, prompt(1), load=False) == []
    assert disk.count("read") == 0


def _keys(instance: FakeInstance, number: int) -> list[bytes]:
    chain = instance.new_chain("", None)
    chain.extend(prompt(number, 6 * CHUNK))
    return list(chain.keys)


def _slot_bytes() -> int:
    settings = InstanceSettings()
    groups = FakeMemory(settings.groups, blocks=2, block_tokens=settings.engine.block_tokens).engine_groups()
    return sum(settings.chunk_blocks * group.block_bytes for group in groups)
