"""What the end-to-end tests ask of an engine again and again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.engines import NO_LOAD, UNUSED, Answer, Engine

BLOCK = 128


def whole_blocks(tokens: int) -> int:
    """Tokens that a hit can have: whole blocks, with one token left to compute."""
    return (tokens - 1) // BLOCK * BLOCK


def difference(after: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    return {name: after[name] - before.get(name, 0) for name in after}


def assert_at_rest(counters: Mapping[str, float]) -> None:
    """No slot is lost: each is free or holds a chunk that can be found. And no copy went wrong."""
    assert counters["free_slots"] + counters["resident_chunks"] == counters["capacity_slots"]
    assert counters["mismatched_blocks"] == 0
    assert counters["failed_loads"] == 0
    assert counters["failed_saves"] == 0


def operator(*words: str) -> dict[str, Any]:
    """What ``kvferry`` answers an operator who runs it beside the engine."""
    ran = subprocess.run(
        [sys.executable, "-m", "kvferry.cli.main", *words, "--format", "json"],
        capture_output=True,
        text=True,
        timeout=120,
        env={name: value for name, value in os.environ.items() if not name.startswith("KVFERRY_")},
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    answer: dict[str, Any] = json.loads(ran.stdout)
    return answer


def live(runtime_dir: Path, *words: str) -> dict[str, Any]:
    return operator("live", *words, "--runtime-dir", str(runtime_dir))


def sized(model: Path, *words: str) -> dict[str, Any]:
    return operator("size", "--model", str(model), *words)


def assert_sized(model: Path, runtime_dir: Path, ranks: int = 1) -> None:
    """A slot of the one running engine is as large as was said beforehand."""
    said = sized(model, "--tp", str(ranks), "--block-tokens", str(BLOCK))
    assert live(runtime_dir, "status")["slot_bytes"] == said["chunk_bytes"]["rank"]


def assert_reuses(engine: Engine, prompt: Sequence[int], ranks: int = 1) -> Answer:
    """Store a new prompt, restore it, compare with vLLM's own prefix hit of the same bytes."""
    engine.reset()
    cold = engine.serve(prompt, NO_LOAD)
    assert cold.cached_tokens == 0
    reference = engine.serve(prompt, UNUSED)
    before = engine.reset()
    ours = engine.serve(prompt)
    gained = difference(engine.reset(), before)
    hit = whole_blocks(len(prompt))
    assert ours.cached_tokens == reference.cached_tokens == gained["hit_tokens"] == hit
    assert ours.tokens == reference.tokens
    assert ours.logprobs == reference.logprobs
    assert gained["verified_blocks"] * BLOCK == hit * ranks
    assert gained["mismatched_blocks"] == 0
    return ours


def assert_close(answer: Answer, reference: Answer, tolerance: float) -> None:
    """Equal but for rounding: for float32, where other shapes of the same sums were computed.

    Compared up to the first token whose two best candidates lie within the tolerance, because from
    there on either continuation is right.
    """
    for mine, theirs in zip(answer.logprobs, reference.logprobs, strict=True):
        ours, expected = dict(mine), dict(theirs)
        best = sorted(expected.values(), reverse=True)
        if best[0] - best[1] <= 2 * tolerance:
            return
        for token in sorted(expected, key=expected.__getitem__)[-2:]:
            assert abs(ours[token] - expected[token]) <= tolerance
    assert answer.tokens == reference.tokens
