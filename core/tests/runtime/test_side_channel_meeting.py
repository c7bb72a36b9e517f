"""Scheduler and workers meet, in any order, and only with whom they should."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from kvferry.api import ErrorKind, KVFerryError
from kvferry.control.lru import LRU
from kvferry.control.manager import CacheManager
from kvferry.data.plans import TransferResult
from kvferry.data.wire import WIRE_VERSION, Done, Hello, Ready
from kvferry.runtime import LoadMode, RequestOptions, RequestState, SchedulerRuntime
from kvferry.runtime.address import MeetingPlace
from kvferry.runtime.grain import GroupShape
from kvferry.runtime.side_channel import LOST_AFTER_SECONDS
from kvferry.testing.fake_instance import InstanceSettings, key_chains, wait_until
from kvferry.testing.leaks import LeakGuard

BLOCK, CHUNK = 4, 16
NEW_CHAIN = key_chains(InstanceSettings())
PROMPT = list(range(2 * CHUNK + 1))


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


OpenScheduler = Callable[..., SchedulerRuntime]


@pytest.fixture
def place(folder: Path) -> MeetingPlace:
    return MeetingPlace("engine", str(folder), {})


@pytest.fixture
def open_scheduler(folder: Path, clock: Clock, leak_guard: LeakGuard) -> Iterator[OpenScheduler]:
    with ExitStack() as stack:

        def open_(world_size: int = 1) -> SchedulerRuntime:
            manager = CacheManager(
                capacity=64,
                chunk_tokens=CHUNK,
                block_tokens=BLOCK,
                policy=LRU(),
                lease_seconds=60.0,
                write_seconds=60.0,
            )
            leak_guard.watch(manager)
            runtime = SchedulerRuntime(
                manager,
                MeetingPlace("engine", str(folder), {}),
                world_size=world_size,
                fingerprint="fake",
                chunk_tokens=CHUNK,
                groups=(GroupShape(BLOCK),),
                load_mode=LoadMode.ASYNC,
                save_generated=True,
                clock=clock,
            )
            runtime.open()
            stack.callback(runtime.close)
            return runtime

        yield open_


def capacity(runtime: SchedulerRuntime) -> int:
    return runtime.statistics()[1].capacity


def request(name: str) -> RequestState:
    return RequestState(
        id=name,
        tokens=PROMPT,
        prompt_tokens=len(PROMPT),
        chain=NEW_CHAIN("", None),
        salt="",
        options=RequestOptions(),
    )


def save(runtime: SchedulerRuntime, name: str = "first") -> int:
    """Plan the save of a prompt; the number of its transfer."""
    runtime.add_request(request(name))
    runtime.match(name, 0, 0, len(PROMPT))
    table = list(range(len(PROMPT) // BLOCK + 1))
    runtime.scheduled(name, len(PROMPT), [table], replace_blocks=True, known_tokens=len(PROMPT))
    (transfer,) = runtime.step_plan(["r"]).saves
    return transfer.id


def hit(runtime: SchedulerRuntime, name: str) -> int:
    """Tokens that a match finds; the match is given back."""
    runtime.add_request(request(name))
    found = runtime.match(name, 0, 0, len(PROMPT))
    runtime.finished(name, [[]], 0, 0)
    return found


def stored(runtime: SchedulerRuntime, count: int = 2) -> None:
    wait_until(lambda: runtime.statistics()[1].resident == count, 10.0, "nothing was stored")


def test_a_worker_that_comes_first_waits_for_the_scheduler(
    place: MeetingPlace, open_scheduler: OpenScheduler, raw_worker: Any
) -> None:
    worker = raw_worker(place)
    worker.ready(5)
    time.sleep(0.1)
    runtime = open_scheduler()
    wait_until(lambda: capacity(runtime) == 5, 10.0, "the worker did not come")
    assert runtime.workers_ready()
    assert not worker.refusals


def test_a_worker_that_comes_later_is_welcome(
    place: MeetingPlace, open_scheduler: OpenScheduler, raw_worker: Any
) -> None:
    runtime = open_scheduler(2)
    raw_worker(place, rank=0, world_size=2).ready(9)
    time.sleep(0.1)
    assert not runtime.workers_ready()
    assert capacity(runtime) == 0
    raw_worker(place, rank=1, world_size=2).ready(6)
    wait_until(lambda: capacity(runtime) == 6, 10.0, "the smallest tier decides")


def test_a_worker_finds_the_scheduler_that_follows_a_dead_one(
    place: MeetingPlace, open_scheduler: OpenScheduler, raw_worker: Any
) -> None:
    first = open_scheduler()
    worker = raw_worker(place)
    worker.ready(5)
    wait_until(lambda: capacity(first) == 5, 10.0, "the worker did not come")
    first.close()
    second = open_scheduler()
    wait_until(lambda: worker.ready(5) or second.workers_ready(), 10.0, "it did not come back")
    wait_until(lambda: capacity(second) == 5, 10.0, "it did not tell its slots")


@pytest.mark.parametrize(
    ("hello", "why"),
    [
        ({"fingerprint": "other"}, "another configuration"),
        ({"world_size": 2}, "of 2"),
        ({"rank": 1}, "rank 1 of 1"),
        ({"rank": -1}, "rank -1 of 1"),
        ({"version": WIRE_VERSION + 1}, "wire version"),
    ],
)
def test_a_worker_that_does_not_fit_is_refused_with_a_reason(
    place: MeetingPlace,
    open_scheduler: OpenScheduler,
    raw_worker: Any,
    hello: dict[str, Any],
    why: str,
) -> None:
    runtime = open_scheduler()
    worker = raw_worker(place, **hello)
    worker.ready()
    wait_until(lambda: bool(worker.refusals), 10.0, "nothing was refused")
    assert why in worker.refusals[0]
    assert not runtime.workers_ready()
    assert capacity(runtime) == 0


def test_a_wrong_token_is_refused(
    place: MeetingPlace, open_scheduler: OpenScheduler, raw_worker: Any
) -> None:
    runtime = open_scheduler()
    place.read_token = lambda: "0" * 64  # type: ignore[method-assign]
    worker = raw_worker(place)
    worker.ready()
    wait_until(lambda: bool(worker.refusals), 10.0, "nothing was refused")
    assert "token" in worker.refusals[0]
    assert not runtime.workers_ready()


def test_a_second_life_of_a_rank_is_refused(
    place: MeetingPlace, open_scheduler: OpenScheduler, raw_worker: Any
) -> None:
    """Its arena is another one: what the scheduler knows of the slots would be wrong."""
    runtime = open_scheduler()
    raw_worker(place, epoch=1)
    wait_until(runtime.workers_ready, 10.0, "no worker")
    second = raw_worker(place, epoch=2)
    wait_until(lambda: bool(second.refusals), 10.0, "nothing was refused")
    assert "restart the engine" in second.refusals[0]


def test_nothing_is_visible_before_every_rank_has_stored_it(
    place: MeetingPlace, open_scheduler: OpenScheduler, raw_worker: Any
) -> None:
    runtime = open_scheduler(2)
    workers = [raw_worker(place, rank=rank, world_size=2) for rank in range(2)]
    for worker in workers:
        worker.ready()
    wait_until(lambda: capacity(runtime) > 0, 10.0, "no workers")
    transfer = save(runtime)
    workers[0].done(TransferResult(transfer))
    workers[0].done(TransferResult(transfer))  # once more does not count for the other rank
    workers[0].done(TransferResult(transfer + 1))
    time.sleep(0.1)
    assert hit(runtime, "second") == 0
    workers[1].done(TransferResult(transfer))
    stored(runtime)
    assert hit(runtime, "third") == 2 * CHUNK
    runtime.finished("first", [[]], 0, 0)


def test_a_failure_on_any_rank_counts_for_all(
    place: MeetingPlace, open_scheduler: OpenScheduler, raw_worker: Any
) -> None:
    runtime = open_scheduler(2)
    workers = [raw_worker(place, rank=rank, world_size=2) for rank in range(2)]
    for worker in workers:
        worker.ready()
    wait_until(lambda: capacity(runtime) > 0, 10.0, "no workers")
    transfer = save(runtime)
    workers[1].done(TransferResult(transfer, (1,), "broken"))
    workers[0].done(TransferResult(transfer))
    stored(runtime, 1)
    assert hit(runtime, "second") == CHUNK
    assert runtime.statistics()[0].failed_saves == 1
    runtime.finished("first", [[]], 0, 0)


def test_a_silent_worker_costs_the_hits_until_it_is_heard_again(
    place: MeetingPlace, open_scheduler: OpenScheduler, raw_worker: Any, clock: Clock
) -> None:
    runtime = open_scheduler()
    worker = raw_worker(place)
    worker.ready()
    wait_until(lambda: capacity(runtime) > 0, 10.0, "no worker")
    worker.done(TransferResult(save(runtime)))
    stored(runtime)
    assert hit(runtime, "second") == 2 * CHUNK
    worker.client.close()
    clock.now += LOST_AFTER_SECONDS + 1
    wait_until(lambda: not runtime.workers_ready(), 10.0, "its silence was not noticed")
    assert hit(runtime, "third") == 0
    again = raw_worker(place)
    again.ready()
    wait_until(runtime.workers_ready, 10.0, "it was not heard again")
    assert hit(runtime, "fourth") == 2 * CHUNK
    runtime.finished("first", [[]], 0, 0)


def test_garbage_is_dropped_and_the_channel_goes_on(
    place: MeetingPlace, open_scheduler: OpenScheduler, raw_worker: Any
) -> None:
    runtime = open_scheduler()
    token = place.read_token()
    assert token is not None
    chance = random.Random(7)
    encode = msgspec.msgpack.encode
    honest = [
        encode(Hello(WIRE_VERSION, token, 0, 1, 3, "fake", 64, 1)),
        encode(Ready(0, 3, 64)),
        encode(Done(0, 3, (TransferResult(1, (2,), "why"),))),
    ]
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(place.endpoint)
    for frames in ([], [b"", b""], [b"x"] * 20):
        socket.send_multipart([b"only", *frames])
    for _ in range(2000):
        frame = bytearray(chance.choice(honest)[: chance.randrange(1, 200)])
        for _ in range(chance.randrange(4)):
            frame[chance.randrange(len(frame))] = chance.randrange(256)
        socket.send(bytes(frame) if chance.random() < 0.8 else chance.randbytes(50))
    socket.send(b"\x91" * 100_000)
    socket.close(200)
    context.term()
    worker = raw_worker(place, epoch=3)
    worker.ready(64)
    wait_until(lambda: capacity(runtime) == 64, 10.0, "the channel fell silent")
    worker.done(TransferResult(save(runtime)))
    stored(runtime)
    runtime.finished("first", [[]], 0, 0)


def test_strangers_are_not_heard(place: MeetingPlace, open_scheduler: OpenScheduler, raw_worker: Any) -> None:
    """A result counts only from a peer that introduced itself with the token."""
    runtime = open_scheduler()
    worker = raw_worker(place)
    worker.ready()
    wait_until(lambda: capacity(runtime) > 0, 10.0, "no worker")
    transfer = save(runtime)
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 1000)
    socket.connect(place.endpoint)
    socket.send(msgspec.msgpack.encode(Done(0, worker.epoch, (TransferResult(transfer),))))
    assert socket.poll(5000), "it was not asked who it is"
    time.sleep(0.05)
    assert runtime.statistics()[1].resident == 0
    socket.close()
    context.term()
    worker.done(TransferResult(transfer))
    stored(runtime)
    runtime.finished("first", [[]], 0, 0)


def test_a_request_that_loads_again_in_the_step_of_its_preemption_is_reported_once(
    place: MeetingPlace, open_scheduler: OpenScheduler, raw_worker: Any
) -> None:
    """Its old blocks may still be read by a save. The end of its load is the one report."""
    runtime = open_scheduler()
    worker = raw_worker(place)
    worker.ready()
    wait_until(lambda: capacity(runtime) > 0, 10.0, "no worker")
    worker.done(TransferResult(save(runtime)))
    stored(runtime)
    longer = [*PROMPT, *range(700, 700 + 2 * CHUNK)]
    again = request("again")
    again.tokens, again.prompt_tokens = longer, len(longer)
    runtime.add_request(again)
    table = [list(range(len(longer) // BLOCK + 1))]
    runtime.match("again", 2 * CHUNK, 0, len(longer))
    runtime.scheduled("again", len(longer), table, replace_blocks=True, known_tokens=len(longer))
    (unfinished,) = runtime.step_plan(["r"]).saves
    # The engine is reset: preempted, matched, allocated, and only then told to the runtime.
    assert runtime.match("again", 0, 1, len(longer)) == 2 * CHUNK
    runtime.allocated("again", 2 * CHUNK, table)
    runtime.preempted("again")
    plan = runtime.step_plan([])
    assert plan.flush == ("again",)
    (load,) = plan.loads
    held = runtime.finished("again", table, 2 * CHUNK, len(longer))
    assert not held, "the end of its load and the end of its saves would both be reported"
    assert runtime.step_plan([]).ended == ()
    worker.done(TransferResult(unfinished.id), TransferResult(load.id))
    runtime.finished("first", [[]], 0, 0)
    wait_until(lambda: runtime.statistics()[1].leases == 0, 10.0, "a lease stayed")


def test_another_request_with_the_same_id_is_not_taken_for_the_first(
    place: MeetingPlace, open_scheduler: OpenScheduler, raw_worker: Any
) -> None:
    runtime = open_scheduler()
    worker = raw_worker(place)
    worker.ready()
    wait_until(lambda: capacity(runtime) > 0, 10.0, "no worker")
    old = save(runtime, "same")
    assert runtime.finished("same", [[]], 0, 0), "its blocks are being read"
    second = request("same")
    second.tokens = [9, *PROMPT[1:]]
    runtime.add_request(second)
    worker.done(TransferResult(old))
    stored(runtime)
    table = list(range(len(PROMPT) // BLOCK + 1))
    runtime.scheduled("same", len(PROMPT), [table], replace_blocks=True, known_tokens=len(PROMPT))
    (new,) = runtime.step_plan(["r"]).saves
    assert runtime.finished("same", [[]], 0, 0), "its blocks are being read too"
    worker.done(TransferResult(new.id))
    stored(runtime, 4)


def test_a_scheduler_that_cannot_listen_gives_its_claim_back(
    place: MeetingPlace, open_scheduler: OpenScheduler
) -> None:
    place.folder.parent.mkdir(mode=0o700)
    place.folder.mkdir(mode=0o700)
    (place.folder / "side.sock").mkdir()
    with pytest.raises(KVFerryError) as caught:
        open_scheduler()
    assert caught.value.kind is ErrorKind.IO
    assert caught.value.remedy
    (place.folder / "side.sock").rmdir()
    open_scheduler()


def test_workers_that_left_leave_no_lease_behind(
    place: MeetingPlace, open_scheduler: OpenScheduler, raw_worker: Any
) -> None:
    from kvferry.data.wire import Bye

    runtime = open_scheduler(2)
    workers = [raw_worker(place, rank=rank, world_size=2) for rank in range(2)]
    for worker in workers:
        worker.ready()
    wait_until(lambda: capacity(runtime) > 0, 10.0, "no workers")
    save(runtime)
    assert runtime.statistics()[1].reservations == 1
    for worker in workers:
        worker.client.send(Bye(rank=worker.rank, epoch=worker.epoch))
    wait_until(lambda: runtime.statistics()[1].reservations == 0, 10.0, "a reservation stayed")
    assert hit(runtime, "second") == 0
    runtime.finished("first", [[]], 0, 0)
