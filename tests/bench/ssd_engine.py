"""A real vLLM that loads from an SSD: how soon the first token comes, and what others notice of it.

The time to the first token with a hit from the SSD is compared with the same hit from the CPU tier, in turn
in one engine, plus the time that the same bytes take at 0.8 of what fio reads past the page cache, between
the two. Decoding is looked at step by step: four requests decode, and now and then a long prompt comes up
from the SSD beside them. Run: ``python -m tests.bench.ssd_engine``.
"""

from __future__ import annotations

import itertools
import json
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.bench.fio import FioJob, fio_missing
from tests.demo.prompts import CHUNK_TOKENS, random_tokens
from tests.e2e.checks import live
from tests.engines import (
    KV_TRANSFER,
    NO_LOAD,
    REPOSITORY,
    UNUSED,
    Engine,
    Trace,
    engine_arguments,
    engine_environment,
    write_config,
)
from tests.models import DEMO, make_model

FOLDER = REPOSITORY / ".demo"
PLACE = "/var/tmp"
"""On a real disk, where /tmp may be memory."""
PROMPT_TOKENS = 4001
HIT_TOKENS = 3968
REPETITIONS = 15
OF_RAW = 0.8
RAW_BYTES = 512 << 20
QUEUE_DEPTH = 32

BUSY = 4
BUSY_TOKENS = 40
LONG = 5
LONG_TOKENS = 7937
EVERY_TOKENS = 60
ROUNDS = 4


def run(repetitions: int = REPETITIONS, rounds: int = ROUNDS) -> dict[str, Any]:
    """Milliseconds of every repetition with their ratios, and of decoding steps with and without a load
    beside them. ``left_out`` says what was not measured and why."""
    with ExitStack() as stack:
        runtime = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvferry-bench-")))
        disk = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvferry-bench-", dir=PLACE)))
        config = write_config(
            runtime / "kvferry.yaml",
            runtime_dir=runtime,
            capacity="1GiB",
            plugins=["backend_ssd"],
            lower={"ssd": f"use: ssd, path: {disk / 'tier'}, capacity: 4GiB, queue_depth: {QUEUE_DEPTH}"},
        )
        engine = stack.enter_context(
            Engine(
                engine_arguments(make_model(FOLDER, DEMO), kv_transfer_config=KV_TRANSFER),
                engine_environment(KVFERRY_CONFIG=str(config)),
                FOLDER / "engine-ssd-bench.log",
            )
        )
        for length in (300, PROMPT_TOKENS):  # the engine's first steps prepare its kernels
            engine.serve([5] * length, UNUSED)
            engine.serve([5] * length, UNUSED)
        return {
            "first_token": _first_token(engine, runtime, disk, repetitions),
            "decoding": _decoding(engine, runtime, rounds),
            "left_out": {"first token against raw reading": fio_missing()} if fio_missing() else {},
        }


def _first_token(engine: Engine, runtime: Path, disk: Path, repetitions: int) -> dict[str, Any]:
    hit_bytes = HIT_TOKENS * DEMO.kv_bytes_per_token
    baseline = FioJob(
        write=False, block=CHUNK_TOKENS * DEMO.kv_bytes_per_token, depth=QUEUE_DEPTH, total=RAW_BYTES
    )
    times: dict[str, list[float]] = {"cpu": [], "ssd": [], "raw": []}
    if not fio_missing():
        FioJob(write=True, block=8 << 20, depth=QUEUE_DEPTH, total=RAW_BYTES).run(disk / "baseline")
    for repetition in range(repetitions):
        prompt = random_tokens(7000 + repetition, PROMPT_TOKENS)
        engine.reset()
        engine.serve(prompt, NO_LOAD)
        turn = {}
        # In every second turn the other way round, with raw reading between the two.
        for name in ("ssd", "raw", "cpu") if repetition % 2 else ("cpu", "raw", "ssd"):
            if name == "raw":
                if not fio_missing():
                    seconds = baseline.run(disk / "baseline")
                    times[name].append(seconds * 1000 * hit_bytes / RAW_BYTES)
                continue
            before = engine.reset()
            if name == "ssd":
                live(runtime, "clear", "--tier", "cpu")
            turn[name] = engine.serve(prompt)
            fetched = engine.settle()["lower_fetched"] - before["lower_fetched"]
            if turn[name].cached_tokens != HIT_TOKENS or (fetched > 0) != (name == "ssd"):
                raise RuntimeError(f"{name}: {turn[name].cached_tokens} tokens hit, {fetched} chunks fetched")
            times[name].append(turn[name].first_token_seconds * 1000)
        if not turn["cpu"].same_as(turn["ssd"]):
            raise RuntimeError("the answers with a hit from the SSD and from the CPU tier differ")
    result: dict[str, Any] = {
        "hit_mib": hit_bytes / (1 << 20),
        "median_ms": {name: statistics.median(each) for name, each in times.items() if each},
        "ssd_to_cpu": statistics.median(times["ssd"]) / statistics.median(times["cpu"]),
        "ms": times,
    }
    if times["raw"]:
        result["baseline"] = " ".join(baseline.command("FILE"))
        allowed = [cpu + raw / OF_RAW for cpu, raw in zip(times["cpu"], times["raw"], strict=True)]
        result["ssd_to_allowed"] = statistics.median(
            ssd / most for ssd, most in zip(times["ssd"], allowed, strict=True)
        )
    return result


def _decoding(engine: Engine, runtime: Path, rounds: int) -> dict[str, Any]:
    long = [random_tokens(8000 + index, LONG_TOKENS) for index in range(LONG)]
    busy = [random_tokens(8100 + index, BUSY_TOKENS) for index in range(BUSY)]
    for prompt in long:
        engine.serve(prompt, NO_LOAD)
        engine.reset()
    most = [EVERY_TOKENS * (LONG + 1)] * BUSY + [1] * LONG
    after = [0] * BUSY + [EVERY_TOKENS * (1 + index) for index in range(LONG)]
    loading: list[float] = []
    quiet: list[float] = []
    ratios: list[float] = []
    throughputs: list[float] = []
    for _ in range(rounds):
        live(runtime, "clear", "--tier", "cpu")
        engine.reset()
        trace = engine.trace([*busy, *long], max_tokens=most, after=after)
        for which in range(BUSY, BUSY + LONG):
            if trace.answers[which].cached_tokens != LONG_TOKENS - 1:
                raise RuntimeError(f"a hit of {trace.answers[which].cached_tokens} tokens")
            beside, before = list(_beside(trace, which)), list(_quiet(trace, which))
            loading += beside
            quiet += before
            if beside:
                ratios.append(statistics.mean(before) / statistics.mean(beside))
            throughputs.append(
                statistics.mean(before) / statistics.mean(_from_this_to_the_next(trace, which))
            )
    return {
        "requests": BUSY,
        "loaded_mib": LONG_TOKENS * DEMO.kv_bytes_per_token / (1 << 20),
        "loads": len(ratios),
        "steps_per_load": len(loading) / max(1, len(ratios)),
        "step_ms": {"quiet": 1000 * statistics.mean(quiet), "loading": 1000 * statistics.mean(loading)},
        "throughput_to_without": statistics.median(throughputs),
        "while_loading_to_without": statistics.median(ratios),
        "ratios": ratios,
    }


def _durations(trace: Trace) -> Sequence[float]:
    return [0.0, *(later - earlier for earlier, later in itertools.pairwise(trace.seconds))]


def _first_step(trace: Trace, which: int, tokens: int) -> int:
    """The step with which a prompt had so many tokens; with none, the one with which it came."""
    return next(number for number, step in enumerate(trace.steps) if step[which] >= tokens)


def _beside(trace: Trace, which: int) -> Iterator[float]:
    """Seconds of the steps in which this prompt came up and nothing of it was computed."""
    added, first = _first_step(trace, which, 0), _first_step(trace, which, 1)
    yield from _durations(trace)[added:first]


def _from_this_to_the_next(trace: Trace, which: int) -> Sequence[float]:
    """Seconds of the ``EVERY_TOKENS`` steps from the arrival of a prompt on: its way up from the SSD, and
    what comes until the next one would. The step that computes its own token is left out: that is no
    loading."""
    added, first = _first_step(trace, which, 0), _first_step(trace, which, 1)
    durations = _durations(trace)
    return [*durations[added:first], *durations[first + 1 : added + EVERY_TOKENS + 1]]


def _quiet(trace: Trace, which: int) -> Iterator[float]:
    """Seconds of the steps before it came, in which the others decoded alone."""
    added = _first_step(trace, which, 0)
    yield from _durations(trace)[added - EVERY_TOKENS // 2 : added]


if __name__ == "__main__":
    print(json.dumps(run(), indent=1))
