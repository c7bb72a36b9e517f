"""What other instances add to a lookup: a hit that a peer holds, a miss, and a hit here.

Run ``python -m tests.bench.p2p_lookup``. Controller, holder and asker are processes of their own on one host.
The engines have no model; schedulers, workers, carriers, the local channel and their threads are the real
ones. A lookup begins with the scheduler's first ``match`` of a prompt of 16 chunks, and with a hit ends when
its chunks begin to be read; with a miss, when nobody is left to ask. In between nobody polls. Beside that an
engine that has nothing else to do steps, as vLLM does, until it gets its answer.

A hit here is looked up in turns by an instance that shares and by one that does not.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from kvferry.api import Channel, PeerCarrier, PeerId
from kvferry.runtime.requests import RequestOptions, RequestState
from kvferry.testing.fake_engine import EngineSettings
from kvferry.testing.fake_instance import (
    FakeInstance,
    InstanceSettings,
    SharingFake,
    open_fake_instance,
    wait_until,
)
from kvferry.testing.fake_requests import Status
from tests.bench.turns import take_turns, timed
from tests.bench.watched_sharing import Marks, WatchedCarrier, WatchedChannel
from tests.controllers import keys_told, running_controller

CHUNK = 16
CHUNKS = 16
HIT = CHUNK * CHUNKS
LOOKUPS = 200
WARM = 5
LOCAL_LOOKUPS = 2000
SECONDS = 60.0
BEHIND = 2
"""New chunks behind a prefix that is here."""
STAGES: Mapping[str, tuple[str, str]] = {
    "until the directory is asked": ("begin", "find"),
    "the directory": ("find", "found"),
    "until the peer is asked": ("found", "ask"),
    "the peer": ("ask", "answered"),
    "until its chunks are read": ("answered", "read"),
}


def run(lookups: int = LOOKUPS) -> dict[str, Any]:
    """Milliseconds at the median and the 99th percentile, and where they go; the ratio of hits here.
    ``left_out`` says what was not measured and why."""
    for package in ("kvferry_sharing_p2p", "kvferry_transport_local"):
        if importlib.util.find_spec(package) is None:
            return {"left_out": {"everything": f"{package.replace('_', '-')} is not installed"}}
    count = 2 * (WARM + lookups)
    with ExitStack() as stack:
        url = stack.enter_context(running_controller())
        stack.enter_context(_holder(url, count))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvf")))
        marks = Marks()
        near = stack.enter_context(_sharing(folder, "near", url, 2 * count, marks))
        alone = stack.enter_context(open_fake_instance(folder, _settings("alone", CHUNKS + 4)))
        wait_until(lambda: "near" in keys_told(url), SECONDS, "an instance that never came to the directory")
        known = itertools.count()
        unknown = itertools.count(count)
        began = time.perf_counter()
        _look_up(near, marks, _prompt(next(known)), "read")
        results: dict[str, Any] = {"first_ms": 1000 * (time.perf_counter() - began)}
        for _ in range(WARM - 1):
            _look_up(near, marks, _prompt(next(known)), "read")
        for kind, last, numbers in (("hit", "read", known), ("miss", "decided", unknown)):
            taken = []
            for _ in range(lookups):
                _look_up(near, marks, _prompt(next(numbers)), last)
                taken.append({name: _span(marks, *ends) for name, ends in _stages(last).items()})
            results[kind] = {name: _summary([each[name] for each in taken]) for name in _stages(last)}
        results["hit of an engine that steps"] = _summary(
            _stepped(near, (_prompt(next(known)) for _ in range(lookups)), HIT)
        )
        results["miss of an engine that steps"] = _summary(
            _stepped(near, (_prompt(next(unknown)) for _ in range(lookups)), 0)
        )
        results["here, with more behind it"] = _summary(_with_more(near, marks, unknown, lookups))
        results["here"] = _here(near, alone)
        results["left_out"] = {}
    return results


def _stages(last: str) -> dict[str, tuple[str, str]]:
    if last == "read":
        return {"all": ("begin", "read"), **STAGES}
    first = dict(itertools.islice(STAGES.items(), 2))
    return {"all": ("begin", last), **first, "until nobody is left to ask": ("found", last)}


def _span(marks: Marks, first: str, last: str) -> float:
    return 1000 * marks.between(first, last)


def _summary(milliseconds: Sequence[float]) -> dict[str, float]:
    return {
        "median_ms": statistics.median(milliseconds),
        "p99_ms": sorted(milliseconds)[len(milliseconds) * 99 // 100],
    }


def _look_up(near: FakeInstance, marks: Marks, tokens: list[int], last: str) -> None:
    """One request up to what its match says in the end, and away with it."""
    scheduler = near.scheduler
    state = _state(near, tokens)
    marks.begin()
    scheduler.add_request(state)
    if scheduler.match(state.id, 0, 0, len(tokens)) is not None:
        raise RuntimeError("a prompt was answered without asking anybody")
    marks.wait(last, SECONDS)
    wait_until(scheduler.lower_at_rest, SECONDS, "something that never came to rest")
    found = scheduler.match(state.id, 0, 0, len(tokens))
    scheduler.forget(state.id)
    if found != (HIT if last == "read" else found and HIT):
        raise RuntimeError(f"a hit of {found} tokens")


def _with_more(near: FakeInstance, marks: Marks, unknown: Iterator[int], lookups: int) -> list[float]:
    """Milliseconds that a request waits that hits here and has more chunks that nobody knows."""
    first = _computed(near, _prompt(next(unknown)))
    taken = []
    for _ in range(lookups):
        _look_up(near, marks, [*first[:HIT], *_prompt(next(unknown), BEHIND)], "decided")
        taken.append(_span(marks, "begin", "decided"))
    return taken


def _stepped(near: FakeInstance, prompts: Iterator[list[int]], hit: int) -> list[float]:
    """Milliseconds from a request's coming to the beginning of the step in which it had its answer."""
    engine = near.engine
    taken = []
    for tokens in prompts:
        began = time.perf_counter()
        request = engine.add(tokens)
        while request.status is Status.WAITING:
            step = time.perf_counter()
            engine.step()
        taken.append(1000 * (step - began))
        engine.run()
        near.settle_lower()
        if sum(request.hits) != hit:
            raise RuntimeError(f"an engine hit {request.hits}, not {hit} tokens")
    return taken


def _here(near: FakeInstance, alone: FakeInstance) -> dict[str, float]:
    """Microseconds of a lookup of what is here, with and without other instances."""
    tokens = _prompt(10**6)
    runs: dict[str, Callable[[], float]] = {}
    for name, instance in (("shared", near), ("alone", alone)):
        _computed(instance, tokens)
        runs[name] = timed(_local_lookup(instance, tokens))
    seconds = take_turns(runs, LOCAL_LOOKUPS)
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    return {
        **{f"{name}_us": 1e6 * each for name, each in medians.items()},
        "shared_to_alone": medians["shared"] / medians["alone"],
    }


def _local_lookup(instance: FakeInstance, tokens: list[int]) -> Callable[[], None]:
    scheduler = instance.scheduler

    def run_once() -> None:
        state = _state(instance, tokens)
        scheduler.add_request(state)
        found = scheduler.match(state.id, 0, 0, len(tokens))
        scheduler.forget(state.id)
        if found != HIT:
            raise RuntimeError(f"a hit of {found} tokens here")

    return run_once


# -- instances -----------------------------------------------------------------------------------------


def _prompt(number: int, chunks: int = CHUNKS) -> list[int]:
    """Whole chunks and one token, like no other prompt's."""
    return [1000 * number + place for place in range(chunks * CHUNK + 1)]


def _state(instance: FakeInstance, tokens: list[int]) -> RequestState:
    return RequestState(
        id=f"lookup-{time.perf_counter_ns()}",
        tokens=tokens,
        prompt_tokens=len(tokens),
        chain=instance.new_chain("", None),
        salt="",
        options=RequestOptions(),
    )


def _computed(instance: FakeInstance, tokens: list[int]) -> list[int]:
    """Have an engine compute and store a prompt."""
    instance.engine.add(tokens)
    instance.engine.run()
    instance.settle_saves()
    return tokens


def _settings(name: str, slots: int, sharing: SharingFake | None = None) -> InstanceSettings:
    engine = EngineSettings(blocks=256, step_tokens=512, prefix_cache=False)
    return InstanceSettings(engine=engine, slots=slots, engine_id=name, sharing=sharing)


@contextmanager
def _sharing(
    folder: Path, name: str, url: str, prompts: int, marks: Marks | None = None
) -> Iterator[FakeInstance]:
    """An instance with room for so many prompts."""
    from kvferry_sharing_p2p.network.endpoint import Endpoint, parse_url
    from kvferry_sharing_p2p.peers.carrier import CarrierSettings, PeerNetworkCarrier
    from kvferry_transport_local.channel import LocalChannel
    from kvferry_transport_local.options import LocalOptions

    settings = CarrierSettings(listen=Endpoint("127.0.0.1", 0), controller=parse_url(url))
    carrier: PeerCarrier = PeerNetworkCarrier(settings, clock=time.monotonic, random=os.urandom)

    def make_channel() -> Channel:
        channel = LocalChannel(LocalOptions())
        return channel if marks is None else WatchedChannel(channel, marks)

    sharing = SharingFake(
        id=PeerId(name, os.urandom(16)),
        carrier=carrier if marks is None else WatchedCarrier(carrier, marks),
        make_channel=make_channel,
    )
    with open_fake_instance(folder, _settings(name, prompts * (CHUNKS + BEHIND), sharing)) as instance:
        yield instance


@contextmanager
def _holder(url: str, prompts: int) -> Iterator[None]:
    """A process that has computed the first prompts, once the directory knows all of it."""
    command = [sys.executable, "-m", "tests.bench.p2p_lookup", "holder", url, str(prompts)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        try:
            if process.stdout.readline().strip() != b"ready":
                raise RuntimeError("the holder did not start")
            wait_until(lambda: keys_told(url).get("far") == prompts * CHUNKS, SECONDS, "keys that never came")
            yield
        finally:
            process.stdin.close()
            process.wait()


def _be_holder(url: str, prompts: int) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="kvf") as folder,
        _sharing(Path(folder), "far", url, prompts) as far,
    ):
        for number in range(prompts):
            _computed(far, _prompt(number))
        print("ready", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    if sys.argv[1:2] == ["holder"]:
        _be_holder(sys.argv[2], int(sys.argv[3]))
    else:
        print(json.dumps(run(), indent=1))
