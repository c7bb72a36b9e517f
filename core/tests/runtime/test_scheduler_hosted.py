"""A scheduler runtime without a side channel: its host hands in the workers' messages."""

from __future__ import annotations

from kvferry.api import GroupGeometry, KVGeometry
from kvferry.control.identity import Namespace
from kvferry.control.keys import KeyChain
from kvferry.control.lru import LRU
from kvferry.control.manager import CacheManager
from kvferry.data.plans import TransferResult
from kvferry.data.wire import WIRE_VERSION, Done, Hello, Ready
from kvferry.runtime import GroupShape, LoadMode, RequestOptions, RequestState, SchedulerRuntime
from kvferry.runtime.address import MeetingPlace

BLOCK, CHUNK = 2, 4
TOKENS = list(range(8))


def hosted() -> SchedulerRuntime:
    """With one worker that is ready."""
    manager = CacheManager(
        capacity=8,
        chunk_tokens=CHUNK,
        block_tokens=BLOCK,
        policy=LRU(),
        lease_seconds=10.0,
        write_seconds=10.0,
    )
    runtime = SchedulerRuntime(
        manager,
        MeetingPlace("hosted", None, {}),
        world_size=1,
        fingerprint="f",
        chunk_tokens=CHUNK,
        groups=(GroupShape(BLOCK),),
        load_mode=LoadMode.ASYNC,
        save_generated=True,
        clock=lambda: 0.0,
    )
    hello = Hello(
        version=WIRE_VERSION,
        token="t",
        rank=0,
        world_size=1,
        epoch=1,
        fingerprint="f",
        slots=8,
        slot_bytes=1,
    )
    assert runtime.deliver(hello) is None
    runtime.deliver(Ready(rank=0, epoch=1, slots=8))
    return runtime


def store(runtime: SchedulerRuntime, name: str) -> int:
    """Let a request compute its prompt; the number of the save that was planned."""
    group = GroupGeometry(kind="full", layers=1, kv_heads=1, head_size=8, dtype="bfloat16")
    namespace = Namespace(model="m", revision="r", geometry=KVGeometry(groups=(group,), chunk_tokens=CHUNK))
    runtime.add_request(
        RequestState(
            id=name,
            tokens=TOKENS,
            prompt_tokens=len(TOKENS),
            chain=KeyChain(namespace, salt="", lora=None),
            salt="",
            options=RequestOptions(),
        )
    )
    assert runtime.match(name, 0, 0, len(TOKENS)) == 0
    runtime.allocated(name, 0, [[1, 2, 3, 4]])
    runtime.scheduled(name, 8, [[1, 2, 3, 4]], replace_blocks=True, known_tokens=8)
    (save,) = runtime.step_plan([name]).saves
    return save.id


def test_a_host_delivers_results_and_runs_timers() -> None:
    runtime = hosted()
    save = store(runtime, "request")
    runtime.run_timers()
    runtime.deliver(Done(rank=0, epoch=1, results=(TransferResult(save),)))
    statistics = runtime.statistics()[1]
    assert (statistics.resident, statistics.reservations) == (2, 0)


def test_saves_of_a_request_that_lost_its_blocks_before_its_end_are_waited_for() -> None:
    """An engine that resets its own cache preempts between two steps; a client may go before the next
    one. The blocks are free by then, so the saves that read them must end before they are written."""
    runtime = hosted()
    store(runtime, "request")
    assert runtime.finished("request", [[]], 0, len(TOKENS))
    runtime.preempted("request")
    plan = runtime.step_plan([])
    assert plan.flush == ("request",)
    assert plan.ended == ("request",)


def test_saves_of_a_request_that_ends_with_its_blocks_hold_nobody_up() -> None:
    runtime = hosted()
    store(runtime, "request")
    assert runtime.finished("request", [[1, 2, 3, 4]], 8, len(TOKENS))
    plan = runtime.step_plan([])
    assert plan.flush == ()
    assert plan.ended == ("request",)
