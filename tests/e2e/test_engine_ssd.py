"""A real vLLM with a tier on an SSD: it is stopped, killed and started again on the same folder."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.demo.prompts import Prompt, random_tokens
from tests.demo_ssd.passes import kill_during_stores
from tests.e2e.checks import assert_at_rest, assert_close, difference, whole_blocks
from tests.e2e.conftest import Launch
from tests.engines import KV_TRANSFER, UNUSED, Answer, Engine
from tests.models import SMALL

CHUNK = 256
BLOCK = 128
CHUNK_BYTES = 2 * CHUNK * SMALL.kv_bytes_per_token
"""In float32."""
TOLERANCE = 2e-3


@pytest.fixture
def folder() -> Iterator[Path]:
    """On a disk, where the file system lets us read past the page cache."""
    with tempfile.TemporaryDirectory(prefix="kvf-", dir="/var/tmp") as path:
        yield Path(path)


def on_ssd(folder: Path, memory: str, capacity: str, more: str = "") -> dict[str, Any]:
    """Arguments of :func:`tests.engines.write_config`."""
    return {
        "capacity": memory,
        "plugins": ["backend_ssd"],
        "lower": {"ssd": f"use: ssd, path: {folder}, capacity: {capacity}{more}"},
    }


def used_bytes(folder: Path) -> int:
    """What the folder takes of the disk, or will once the holes of its files are filled."""
    files = [file.stat() for file in folder.rglob("*") if file.is_file()]
    return sum(max(file.st_size, file.st_blocks * 512) for file in files)


def store(engine: Engine, prompts: list[tuple[int, ...]]) -> list[Answer]:
    """Have them stored; their answers with vLLM's own prefix hit."""
    references = []
    for prompt in prompts:
        engine.serve(prompt)
        references.append(engine.serve(prompt, UNUSED))
        engine.reset()
    return references


def assert_in_order(counters: dict[str, float]) -> None:
    assert_at_rest(counters)
    assert counters["lower_open"] == 1
    for name in ("storing", "fetching", "corrupt", "failures", "failed_stores", "failed_fetches"):
        assert counters[f"lower_{name}"] == 0, name


def multi(folder: Path) -> dict[str, Any]:
    """kvferry, and beside it a connector that never has anything."""
    example = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [KV_TRANSFER, example]},
    }


def test_what_was_stored_outlives_a_stop_and_a_kill(launch: Launch, folder: Path, tmp_path: Path) -> None:
    prompts = [random_tokens(1 + index, 1500 + 100 * index) for index in range(6)]
    # Memory holds two of them.
    config = on_ssd(folder, "16MiB", "256MiB", ", in_flight: 8MiB")
    with launch(config=config, dtype="float32") as engine:
        references = store(engine, prompts)
        stored = engine.settle()
        assert stored["evictions"] > 0
        assert_in_order(stored)

    with launch(config=config, dtype="float32") as engine:
        before = engine.opened()
        assert before["lower_adopted"] == stored["lower_chunks"]
        for prompt, reference in zip(prompts, references, strict=True):
            answer = engine.serve(prompt)
            assert answer.cached_tokens == whole_blocks(len(prompt))
            assert answer.same_as(reference)
            engine.reset()
        after = engine.settle()
        assert_in_order(after)
        gained = difference(after, before)
        assert gained["lower_fetched"] >= sum(len(prompt) // CHUNK for prompt in prompts)
        assert gained["lower_stored"] == 0
        assert gained["verified_blocks"] * BLOCK == sum(whole_blocks(len(prompt)) for prompt in prompts)
        late = [random_tokens(50 + index, 3000) for index in range(6)]
        kill_during_stores(engine, [Prompt(note="", tokens=prompt) for prompt in late], folder)

    # A smaller capacity now, copies at evictions alone, and another connector beside.
    capacity = 32 << 20
    config = on_ssd(folder, "16MiB", "32MiB", ", store: write_on_evict, in_flight: 8MiB")
    described = launch(
        config=config, dtype="float32", transfer=multi(tmp_path), disable_hybrid_kv_cache_manager=True
    )
    with described as engine:
        before = engine.opened()
        assert 0 < before["lower_adopted"] <= capacity // CHUNK_BYTES
        assert used_bytes(folder) <= capacity
        for prompt, reference in zip(prompts, references, strict=True):
            assert_close(engine.serve(prompt), reference, TOLERANCE)
            engine.reset()
        assert difference(engine.settle(), before)["lower_fetched"] > 0
        for prompt in late:
            lone = engine.serve(prompt, UNUSED)
            engine.reset()
            assert_close(engine.serve(prompt), lone, TOLERANCE)
            engine.reset()
            assert used_bytes(folder) <= capacity
        # Memory has the last one and a half; the SSD has what was evicted before, its own eviction included.
        again = engine.settle()
        answer = engine.serve(late[-3])
        assert answer.cached_tokens > 0
        gained = difference(engine.reset(), again)
        assert gained["lower_fetched"] > 0
        assert_in_order(engine.settle())
        assert used_bytes(folder) <= capacity


def test_all_ranks_find_their_share_again(launch: Launch, cores: list[int], folder: Path) -> None:
    if len(cores) < 2:
        pytest.skip("two ranks need two cores")
    described = {
        "config": on_ssd(folder, "32MiB", "64MiB", ", in_flight: 8MiB"),
        "tensor_parallel_size": 2,
        "environment": {"VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[1]}"},
        "max_num_batched_tokens": 4096,
        "max_model_len": 4096,
    }
    prompt = random_tokens(1, 1200)
    with launch(**described) as engine:
        (reference,) = store(engine, [prompt])
        assert_in_order(engine.settle())
    with launch(**described) as engine:
        engine.opened()
        answer = engine.serve(prompt)
        assert answer.cached_tokens == whole_blocks(1200)
        assert answer.same_as(reference)
        counters = engine.reset()
        assert counters["lower_fetched"] == counters["lower_adopted"] == 5
        assert counters["verified_blocks"] * BLOCK == 2 * whole_blocks(1200)
        assert_in_order(counters)
