"""Time to first token of a 4,001-token prompt: cold, from vLLM's own prefix cache, from kvferry.

All three are measured in turn, in one engine, with the same tokens. Run: ``python -m tests.bench.ttft``.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from tests.demo.prompts import random_tokens
from tests.engines import (
    KV_TRANSFER,
    NO_LOAD,
    REPOSITORY,
    UNUSED,
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
VERIFIED_REPETITIONS = 5


def run(repetitions: int = REPETITIONS) -> dict[str, Any]:
    """Milliseconds of every repetition, medians and ratios; also with digests of every block."""
    plain = _measure(repetitions, verify=False)
    verified = _measure(VERIFIED_REPETITIONS, verify=True)
    median = {name: statistics.median(times) for name, times in plain.items()}
    own = statistics.median(verified["own"])
    return {
        "prompt_tokens": PROMPT_TOKENS,
        "hit_tokens": HIT_TOKENS,
        "hit_mib": HIT_TOKENS * DEMO.kv_bytes_per_token / (1 << 20),
        "repetitions": repetitions,
        "median_ms": median,
        "quartiles_ms": {name: statistics.quantiles(times, n=4) for name, times in plain.items()},
        "kvferry_to_own": median["kvferry"] / median["own"],
        "cold_to_kvferry": median["cold"] / median["kvferry"],
        "verify_to_own": statistics.median(verified["kvferry"]) / own,
        "ms": plain,
        "verified_ms": verified,
    }


def _measure(repetitions: int, *, verify: bool) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {"cold": [], "own": [], "kvferry": []}
    with tempfile.TemporaryDirectory(prefix="kvferry-bench-") as runtime:
        config = write_config(
            Path(runtime) / "kvferry.yaml", runtime_dir=Path(runtime), capacity="2GiB", verify=verify
        )
        with Engine(
            engine_arguments(make_model(FOLDER, DEMO), kv_transfer_config=KV_TRANSFER),
            engine_environment(KVFERRY_CONFIG=str(config)),
            FOLDER / "engine-ttft.log",
        ) as engine:
            for length in (300, PROMPT_TOKENS):  # the engine's first steps prepare its kernels
                engine.serve([5] * length, UNUSED)
                engine.serve([5] * length, UNUSED)
            for repetition in range(repetitions):
                for name, milliseconds in _turn(engine, repetition).items():
                    times[name].append(milliseconds)
    return times


def _turn(engine: Engine, repetition: int) -> dict[str, float]:
    prompt = random_tokens(1000 + repetition, PROMPT_TOKENS)
    engine.reset()
    cold = engine.serve(prompt, NO_LOAD)
    engine.settle()
    answers = {"cold": cold}
    # In every second turn the other way round, so that neither always follows a cold run.
    for name in ("own", "kvferry") if repetition % 2 else ("kvferry", "own"):
        if name == "kvferry":
            engine.reset()
        else:
            engine.settle()
        answers[name] = engine.serve(prompt, UNUSED if name == "own" else None)
        if answers[name].cached_tokens != HIT_TOKENS:
            raise RuntimeError(f"{name}: a hit of {answers[name].cached_tokens} tokens, not {HIT_TOKENS}")
    if not answers["own"].same_as(answers["kvferry"]):
        raise RuntimeError("the answers with kvferry and with vLLM's own prefix cache differ")
    return {name: answer.first_token_seconds * 1000 for name, answer in answers.items()}


if __name__ == "__main__":
    print(json.dumps(run(), indent=1))
