"""What the connector costs when it never hits: vLLM with it and without it, in turn.

Both engines live at once and rest in turn; every prompt is new, and with the connector each one is
saved while the next are computed. Run: ``python -m tests.bench.throughput``.
"""

from __future__ import annotations

import json
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
PAIRS = 9
PROMPTS = 8
PROMPT_TOKENS = 1000
NEW_TOKENS = 32
REST_SECONDS = 2.0
"""An engine's processes spin for up to a second after their last step; the other one waits for that."""
RESAMPLES = 10_000


def run(pairs: int = PAIRS) -> dict[str, Any]:
    """Ratio of tokens per second, with the connector to without; seconds of every batch."""
    seconds: dict[str, list[float]] = {"without": [], "with": []}
    with ExitStack() as stack:
        runtime = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvferry-bench-")))
        config = write_config(runtime / "kvferry.yaml", runtime_dir=runtime, capacity="768MiB")
        model = make_model(FOLDER, DEMO)
        # Smaller batches than a whole prompt set: saves run beside the forward passes that follow.
        arguments = engine_arguments(model, max_num_batched_tokens=2048)
        environment = engine_environment(KVFERRY_CONFIG=str(config))
        engines = {
            name: stack.enter_context(
                Engine({**arguments, **more}, environment, FOLDER / f"engine-{name}.log")
            )
            for name, more in (("without", {}), ("with", {"kv_transfer_config": KV_TRANSFER}))
        }
        for engine in engines.values():
            _batch(engine, _prompts(0))
        for pair in range(pairs):
            order = ("with", "without") if pair % 2 else ("without", "with")
            for name in order:
                time.sleep(REST_SECONDS)
                # The same prompts for both: each engine sees every one for the first time.
                seconds[name].append(_batch(engines[name], _prompts(1 + pair)))
        counters = engines["with"].settle()
    if counters["hit_tokens"] or not counters["saved_tokens"]:
        raise RuntimeError("this bench is about saves without hits, and there was a hit or no save")
    ratios = [without / with_ for without, with_ in zip(seconds["without"], seconds["with"], strict=True)]
    tokens = PROMPTS * (PROMPT_TOKENS + NEW_TOKENS)
    return {
        "pairs": pairs,
        "tokens_per_batch": tokens,
        "tokens_per_second": {name: tokens / statistics.median(each) for name, each in seconds.items()},
        "ratios": ratios,
        "median_ratio": statistics.median(ratios),
        "lower_95": lower_bound(ratios),
        "saved_mib": counters["saved_bytes"] / (1 << 20),
        "evictions": counters["evictions"],
        "seconds": seconds,
    }


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
