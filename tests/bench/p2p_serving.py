"""What a real vLLM notices of a peer that reads from it, and what the peer notices of the engine.

Run ``python -m tests.bench.p2p_serving``. The engine computes on all cores but one. On that one a light
process without an engine asks for the 16 chunks of one prompt again and again: who reads takes no core from
the engine. In the first part the engine prefills and decodes back to back, and each ask is timed. In the
second the same work is done block by block, with the peer still, asking a hundred times a second, reading all
that it asks for ten times a second, and doing either without a pause, in turns.
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
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.controllers import running_controller
from tests.demo.prompts import CHUNK_TOKENS, random_tokens
from tests.engines import (
    KV_TRANSFER,
    REPOSITORY,
    UNUSED,
    Engine,
    engine_arguments,
    engine_environment,
    write_config,
)
from tests.models import DEMO, make_model

FOLDER = REPOSITORY / ".demo"
CHUNKS = 16
ROUNDS = 12
BUSY = 4
BUSY_TOKENS = 40
DECODED = 60
LONG_TOKENS = 1025
LONG_AFTER = 30
ANSWERS_SECONDS = 30.0
ALL_THE_TIME = ("ask", "read")
WAYS = ("still", "ask 100", "read 10", *ALL_THE_TIME)
"""What the peer does: a number is how often in a second."""


def run(rounds: int = ROUNDS, seconds: float = ANSWERS_SECONDS) -> dict[str, Any]:
    """Milliseconds of answers while the engine computes, and what blocks of its work take with a peer, to
    blocks without. ``left_out`` says what was not measured and why."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        return {"left_out": {"everything": "engine and peer need a core each"}}
    for package in ("kvferry_sharing_p2p", "kvferry_transport_local"):
        if importlib.util.find_spec(package) is None:
            return {"left_out": {"everything": f"{package.replace('_', '-')} is not installed"}}
    with ExitStack() as stack:
        url = stack.enter_context(running_controller())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvferry-bench-")))
        engine = stack.enter_context(_engine(folder, url, cores[:-1]))
        from tests.bench.peer_asker import SEED

        prefix = random_tokens(SEED, CHUNKS * CHUNK_TOKENS + 1)
        for length in (300, LONG_TOKENS):  # the engine's first steps prepare its kernels
            engine.serve([5] * length, UNUSED)
        engine.serve(prefix)
        engine.settle()
        asker = stack.enter_context(_asker(url, len(prefix), cores[-1]))
        seeds = itertools.count(9100)
        _block(engine, seeds)
        return {
            "answers": {way: _answers(engine, asker, way, seeds, seconds / 2) for way in ALL_THE_TIME},
            "steps": _steps(engine, asker, seeds, rounds),
            "left_out": {},
        }


class Asker:
    """The peer's process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def begin(self, way: str) -> None:
        self._tell(way)

    def end(self) -> dict[str, Any]:
        self._tell("stop")
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the peer ended")
        outcome: dict[str, Any] = json.loads(line)
        return outcome

    def _tell(self, word: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()


def _answers(
    engine: Engine, asker: Asker, way: str, seeds: Iterator[int], seconds: float
) -> dict[str, float]:
    asker.begin(way)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        _block(engine, seeds)
    outcome = asker.end()
    times = sorted(outcome["ms"])
    return {
        "asks": len(times),
        "median_ms": statistics.median(times),
        "p99_ms": times[len(times) * 99 // 100],
        "most_ms": times[-1],
        "read GB/s": outcome["bytes"] / outcome["seconds"] / 1e9,
    }


def _steps(engine: Engine, asker: Asker, seeds: Iterator[int], rounds: int) -> dict[str, Any]:
    blocks: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for turn in range(rounds):
        for way in reversed(WAYS) if turn % 2 else WAYS:
            if way != "still":
                asker.begin(way)
            blocks[way].append(_block(engine, seeds))
            if way != "still":
                asker.end()
    result: dict[str, Any] = {"ms": blocks}
    for what in ("step", "decode", "prefill"):
        for way in WAYS:
            result.setdefault(way, {})[f"{what}_ms"] = statistics.median(each[what] for each in blocks[way])
        for way in WAYS[1:]:
            result[way][f"{what}_to_still"] = statistics.median(
                there[what] / here[what] for here, there in zip(blocks["still"], blocks[way], strict=True)
            )
    return result


def _block(engine: Engine, seeds: Iterator[int]) -> dict[str, float]:
    """Four requests decode, and in their midst a long prompt is computed. Milliseconds of a step of it all at
    the mean, of one that decodes at the median, and of the one that computes the long prompt."""
    busy = [random_tokens(next(seeds), BUSY_TOKENS) for _ in range(BUSY)]
    trace = engine.trace(
        [*busy, random_tokens(next(seeds), LONG_TOKENS)],
        max_tokens=[DECODED] * BUSY + [1],
        after=[0] * BUSY + [LONG_AFTER],
    )
    if trace.answers[BUSY].cached_tokens:
        raise RuntimeError("a prompt that nobody knows was hit")
    durations = [later - earlier for earlier, later in itertools.pairwise(trace.seconds)]
    long = next(number for number, step in enumerate(trace.steps) if step[BUSY] == 1) - 1
    others = durations[:long] + durations[long + 1 :]
    return {
        "step": 1000 * trace.seconds[-1] / len(trace.seconds),
        "decode": 1000 * statistics.median(others),
        "prefill": 1000 * durations[long],
    }


@contextmanager
def _engine(folder: Path, url: str, cores: list[int]) -> Iterator[Engine]:
    from tests.bench.peer_asker import MODEL

    config = write_config(
        folder / "kvferry.yaml",
        runtime_dir=folder,
        capacity="1GiB",
        plugins=["transport_local", "sharing_p2p"],
        more=(
            f"instance: engine\nmodel_identity: {MODEL}\n"
            "channel: {use: local}\n"
            f"lookup: {{use: controller, url: '{url}'}}\n"
            "p2p: {use: p2p}\n"
        ),
    )
    bound = ",".join(str(core) for core in cores)
    with Engine(
        engine_arguments(make_model(FOLDER, DEMO), kv_transfer_config=KV_TRANSFER),
        engine_environment(KVFERRY_CONFIG=str(config), VLLM_CPU_OMP_THREADS_BIND=bound),
        FOLDER / "engine-p2p-serving.log",
    ) as engine:
        yield engine


@contextmanager
def _asker(url: str, tokens: int, core: int) -> Iterator[Asker]:
    command = [sys.executable, "-m", "tests.bench.peer_asker", url, "engine", str(tokens), str(core)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            if process.stdout.readline().strip() != "ready":
                raise RuntimeError("the peer did not meet the engine")
            yield Asker(process)
        finally:
            process.stdin.close()
            process.wait()


if __name__ == "__main__":
    print(json.dumps(run(), indent=1))
