"""Hook calls while an engine runs: hooks describe, and nothing on the engine's step asks them again.

A fake engine drives both runtimes, opened from a configuration with real plugins. Run:
``python -m tests.bench.hooks``.
"""

from __future__ import annotations

import json
import os
import random
import tempfile
from pathlib import Path
from typing import Any

from kvferry.api import HostEnvironment
from kvferry.runtime import ConfigSources, Prepared, prepare
from kvferry.testing.configured_engine import open_configured_engine
from kvferry.testing.fake_engine import EngineSettings
from tests.engines import write_config

STEPS = 10_000
CHUNK_TOKENS = 16


def run(steps: int = STEPS) -> dict[str, Any]:
    """``hook_calls`` during ``steps`` engine steps with requests that are stored and restored."""
    calls: list[str] = []
    environment = {"PATH": os.environ.get("PATH", "")}
    host = HostEnvironment(variables=environment)
    with tempfile.TemporaryDirectory(prefix="kvf-") as folder:
        file = write_config(
            Path(folder) / "kvferry.yaml",
            runtime_dir=Path(folder),
            capacity="1MiB",
            chunk_tokens=CHUNK_TOKENS,
        )
        prepared = prepare(ConfigSources(file=file, environment={}, overrides={}), host, connector="vllm")
        stop = prepared.plugins.monitor_hook_calls(calls.append)
        try:
            engine_steps, hits = _drive(prepared, environment, steps)
            during = len(calls)
            prepared.plugins.facts(host)
            seen = len(calls) - during
        finally:
            stop()
    if not seen:
        raise RuntimeError("the counter does not see hook calls, so its zero says nothing")
    if not hits:
        raise RuntimeError("nothing was restored, so the hot path was not run")
    return {"steps": engine_steps, "hit_tokens": hits, "hook_calls": during}


def _drive(prepared: Prepared, environment: dict[str, str], steps: int) -> tuple[int, int]:
    # Without a prefix cache of its own, so that everything is restored from the tier.
    settings = EngineSettings(prefix_cache=False)
    opening = open_configured_engine(prepared, settings, engine_id="bench", environment=environment)
    with opening as opened:
        engine = opened.engine
        source = random.Random(0)
        prompts = [[source.randrange(50_000) for _ in range(40 + 5 * i)] for i in range(16)]
        while engine.steps < steps:
            for prompt in source.sample(prompts, 4):
                engine.add(prompt, new_tokens=8)
            engine.run()
        return engine.steps, opened.scheduler.statistics()[0].hit_tokens


if __name__ == "__main__":
    print(json.dumps(run(), indent=1))
