"""What the connector costs when it never hits: vLLM with it and without it, in turn.

Both engines live at once and rest in turn; every prompt is new, and with the connector each one is
saved while the next are computed. One start of an engine is some percent faster or slower than the
next start of the same engine (2 % were seen between two without a connector), so everything is measured
with two starts of each, in either order, and a pair's ratio is the geometric mean of both. Run:
``python -m tests.bench.throughput``.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.demo.prompts import random_tokens
from tests.engines import (
    KV_TRANSFER,
    REPOSITORY,
    Engine,
    engine_arguments,
    engine_environment,
    write_config,
)
from tests.models import DEMO, make_model

FOLDER = REPOSITORY / ".demo"
PAIRS = 7
PROMPTS = 8
PROMPT_TOKENS = 1000
NEW_TOKENS = 32
REST_SECONDS = 2.0
"""An engine's processes spin for up to a second after their last step; the other one waits for that."""
RESAMPLES = 10_000


def run(pairs: int = PAIRS) -> dict[str, Any]:
    """Ratio of tokens per second, with the connector to without; seconds of every batch."""
    first = _measure(pairs, ("without", "with"))
    second = _measure(pairs, ("with", "without"))
    by_order = [
        [without / with_ for without, with_ in zip(each["without"], each["with"], strict=True)]
        for each in (first, second)
    ]
    ratios = [math.sqrt(one * other) for one, other in zip(*by_order, strict=True)]
    tokens = PROMPTS * (PROMPT_TOKENS + NEW_TOKENS)
    seconds = {name: [*first[name], *second[name]] for name in first}
    return {
        "pairs": pairs,
        "tokens_per_batch": tokens,
        "tokens_per_second": {name: tokens / statistics.median(each) for name, each in seconds.items()},
        "ratios": ratios,
        "median_ratio": statistics.median(ratios),
        "lower_95": lower_bound(ratios),
        "median_ratio_started_second": statistics.median(by_order[0]),
        "median_ratio_started_first": statistics.median(by_order[1]),
        "seconds": {"without started first": first, "with started first": second},
    }


def _measure(pairs: int, start_order: Sequence[str]) -> dict[str, list[float]]:
    """Seconds of every batch, by engine."""
    seconds: dict[str, list[float]] = {"without": [], "with": []}
    with ExitStack() as stack:
        runtime = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvferry-bench-")))
        config = write_config(runtime / "kvferry.yaml", runtime_dir=runtime, capacity="768MiB")
        model = make_model(FOLDER, DEMO)
        # Smaller batches than a whole prompt set: saves run beside the forward passes that follow.
        arguments = engine_arguments(model, max_num_batched_tokens=2048)
        environment = engine_environment(KVFERRY_CONFIG=str(config))
        more: dict[str, dict[str, Any]] = {"without": {}, "with": {"kv_transfer_config": KV_TRANSFER}}
        engines = {
            name: stack.enter_context(
                Engine({**arguments, **more[name]}, environment, FOLDER / f"engine-{name}.log")
            )
            for name in start_order
        }
        for engine in engines.values():
            _batch(engine, _prompts(0))
        for pair in range(pairs):
            for name in start_order if pair % 2 else reversed(start_order):
                time.sleep(REST_SECONDS)
                # The same prompts for both: each engine sees every one for the first time.
                seconds[name].append(_batch(engines[name], _prompts(1 + pair)))
        counters = engines["with"].settle()
    if counters["hit_tokens"] or not counters["saved_tokens"]:
        raise RuntimeError("this bench is about saves without hits, and there was a hit or no save")
    return seconds


def lower_bound(ratios: Sequence[float], resamples: int = RESAMPLES) -> float:
    """Lower end of the 95 % interval of the median, by the bootstrap."""
    source = random.Random(0)
    medians = sorted(statistics.median(source.choices(ratios, k=len(ratios))) for _ in range(resamples))
    return medians[int(0.025 * resamples)]


def _prompts(turn: int) -> list[tuple[int, ...]]:
    return [random_tokens(50_000 + 100 * turn + index, PROMPT_TOKENS) for index in range(PROMPTS)]


def _batch(engine: Engine, prompts: Sequence[Sequence[int]]) -> float:
    return engine.seconds(prompts, max_tokens=NEW_TOKENS)


if __name__ == "__main__":
    print(json.dumps(run(), indent=1))
