"""Time to the first token of a 4,001-token prompt that another vLLM on the same host has computed.

Run ``python -m tests.bench.p2p_ttft``. Two real vLLM with kvferry over the local channel, and a third whose
cache is Mooncake Store, in a process of its own, over TCP of the same host. All are there all the time and
take turns: a hit at the peer, the same hit from the CPU tier here, vLLM's own prefix hit of the same length
as the floor, the prompt computed, and a hit in Mooncake Store with that engine's own floor. ``modes`` are
ways in which kvferry reads from peers: ``eager``, into the first tier before the engine loads, and
``delayed``, through two landing buffers into the engine's blocks.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from tests.bench.environments import CACHE, PackageMissing
from tests.bench.mooncake_store import mooncake_engine
from tests.controllers import keys_told, running_controller
from tests.demo.prompts import CHUNK_TOKENS, random_tokens
from tests.e2e.checks import live
from tests.engines import (
    KV_TRANSFER,
    NO_LOAD,
    REPOSITORY,
    UNUSED,
    Answer,
    Engine,
    engine_arguments,
    engine_environment,
    write_config,
)
from tests.models import DEMO, make_model

FOLDER = REPOSITORY / ".demo"
PROMPT_TOKENS = 4001
HIT_TOKENS = 3968
REPETITIONS = 15
PATIENCE = 30.0
STORED_SECONDS = 0.5
"""Mooncake does not say when what was computed is stored."""
MODES: Mapping[str, str] = {
    "eager": "{use: p2p}",
    "delayed": "{use: p2p, delay: true, land_on: device}",
}
OURS = ("peer", "cpu", "own")


def run(
    repetitions: int = REPETITIONS, modes: Sequence[str] = ("eager",), cache: Path = CACHE
) -> dict[str, Any]:
    """By mode: milliseconds of every repetition, medians, and ratios to Mooncake's hit and to vLLM's own.
    ``left_out`` says what was not measured and why."""
    for package in ("kvferry_sharing_p2p", "kvferry_transport_local"):
        if importlib.util.find_spec(package) is None:
            return {"left_out": {"everything": f"{package.replace('_', '-')} is not installed"}}
    results: dict[str, Any] = {"hit_mib": HIT_TOKENS * DEMO.kv_bytes_per_token / (1 << 20), "left_out": {}}
    seeds = itertools.count(20_000)
    with ExitStack() as stack:
        mooncake: Engine | None = None
        try:
            mooncake = stack.enter_context(mooncake_engine(cache, FOLDER))
        except PackageMissing as missing:
            results["left_out"]["Mooncake Store"] = str(missing)
        else:
            _warm(mooncake)
        for mode in modes:
            results[mode] = _measure(mode, repetitions, seeds, mooncake)
    return results


def _measure(mode: str, repetitions: int, seeds: Iterator[int], mooncake: Engine | None) -> dict[str, Any]:
    times: dict[str, list[float]] = {}
    with ExitStack() as stack:
        url = stack.enter_context(running_controller())
        near, far = _Instance(stack, "near", url, mode), _Instance(stack, "far", url, mode)
        for instance in (near, far):
            instance.engine.start()
        for instance in (near, far):
            instance.engine.wait_ready()
            _warm(instance.engine)
        _kvferry_turn(near, far, url, next(seeds), backwards=False)  # peers meet, connections are made
        for turn in range(repetitions):
            seed = next(seeds)
            runs = [partial(_kvferry_turn, near, far, url, seed, backwards=turn % 2 == 1)]
            if mooncake is not None:
                runs.append(partial(_mooncake_turn, mooncake, seed))
            for each in reversed(runs) if turn % 2 else runs:
                for name, milliseconds in each().items():
                    times.setdefault(name, []).append(milliseconds)
    median = {name: statistics.median(each) for name, each in times.items()}
    ratios = {"peer_to_own": _ratio(times, "peer", "own"), "peer_to_cpu": _ratio(times, "peer", "cpu")}
    if mooncake is not None:
        ratios["peer_to_mooncake"] = _ratio(times, "peer", "mooncake")
        ratios["mooncake_to_own"] = _ratio(times, "mooncake", "mooncake_own")
    return {"median_ms": median, "cold_to_peer": _ratio(times, "cold", "peer"), **ratios, "ms": times}


def _ratio(times: Mapping[str, Sequence[float]], one: str, other: str) -> float:
    """The median over turns, in which both are neighbours in time."""
    return statistics.median(a / b for a, b in zip(times[one], times[other], strict=True))


def _warm(engine: Engine) -> None:
    for length in (300, PROMPT_TOKENS):  # the engine's first steps prepare its kernels
        engine.serve([5] * length, UNUSED)
        engine.serve([5] * length, UNUSED)


class _Instance:
    """An engine of the stack with kvferry, not started yet. Each has a folder for sockets of its own, so that
    an operator who means one of them finds no other."""

    def __init__(self, stack: ExitStack, name: str, url: str, mode: str) -> None:
        self.runtime = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvferry-bench-")))
        config = write_config(
            self.runtime / "kvferry.yaml",
            runtime_dir=self.runtime,
            capacity="1GiB",
            plugins=["transport_local", "sharing_p2p"],
            more=(
                f"instance: {name}\n"
                "channel: {use: local}\n"
                f"lookup: {{use: controller, url: '{url}'}}\n"
                f"p2p: {MODES[mode]}\n"
            ),
        )
        self.engine = Engine(
            engine_arguments(make_model(FOLDER, DEMO), kv_transfer_config=KV_TRANSFER),
            engine_environment(KVFERRY_CONFIG=str(config)),
            FOLDER / f"engine-p2p-{name}.log",
        )
        stack.callback(self.engine.close)

    def forget(self) -> None:
        """All that it has, so that only others can have it."""
        self.engine.reset()
        live(self.runtime, "clear", "--tier", "cpu")


def _kvferry_turn(
    near: _Instance, far: _Instance, url: str, seed: int, *, backwards: bool
) -> dict[str, float]:
    prompt = random_tokens(seed, PROMPT_TOKENS)
    far.forget()
    # The other computes it; its time counts: near has the same cores, and nothing to load.
    answers = {"cold": far.engine.serve(prompt, NO_LOAD)}
    far.engine.settle()
    _wait_for_keys(url, PROMPT_TOKENS // CHUNK_TOKENS)
    near.forget()
    for name in ("own", "cpu", "peer") if backwards else OURS:
        answers[name] = _hit(near, prompt, name)
    if not answers["own"].same_as(answers["peer"]) or not answers["own"].same_as(answers["cpu"]):
        raise RuntimeError("the answers out of different memories differ")
    return {name: answer.first_token_seconds * 1000 for name, answer in answers.items()}


def _hit(near: _Instance, prompt: Sequence[int], name: str) -> Answer:
    engine = near.engine
    if name == "peer":
        near.forget()
    else:
        # Whatever order these come in: here by now, also where peers' chunks are not kept.
        engine.serve(prompt)
        if name == "cpu":
            engine.reset()
        else:
            engine.settle()
    answer = engine.serve(prompt, UNUSED if name == "own" else None)
    if answer.cached_tokens != HIT_TOKENS:
        raise RuntimeError(f"{name}: a hit of {answer.cached_tokens} tokens, not {HIT_TOKENS}")
    return answer


def _wait_for_keys(url: str, count: int) -> None:
    deadline = time.monotonic() + PATIENCE
    while keys_told(url).get("far") != count:
        if time.monotonic() > deadline:
            raise RuntimeError("the directory was never told of what was computed")
        time.sleep(0.05)


def _mooncake_turn(engine: Engine, seed: int) -> dict[str, float]:
    prompt = random_tokens(seed, PROMPT_TOKENS)
    engine.reset()
    cold = engine.serve(prompt)
    time.sleep(STORED_SECONDS)
    engine.reset()
    hit = engine.serve(prompt)
    engine.settle()
    own = engine.serve(prompt)
    for name, answer in (("Mooncake Store", hit), ("vLLM beside it", own)):
        if answer.cached_tokens != HIT_TOKENS:
            raise RuntimeError(f"{name}: a hit of {answer.cached_tokens} tokens, not {HIT_TOKENS}")
    named = {"mooncake_cold": cold, "mooncake": hit, "mooncake_own": own}
    return {name: answer.first_token_seconds * 1000 for name, answer in named.items()}


if __name__ == "__main__":
    print(json.dumps(run(), indent=1))
