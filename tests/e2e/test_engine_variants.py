"""Ways to run vLLM, each once: the same reuse, the same answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.demo.prompts import random_tokens
from tests.e2e.checks import assert_at_rest, assert_reuses, assert_sized, difference, whole_blocks
from tests.e2e.conftest import Launch
from tests.engines import KV_TRANSFER, UNUSED


def test_both_roles_in_one_process_with_synchronous_loads(launch: Launch) -> None:
    described = launch(config={"load": "sync"}, environment={"VLLM_ENABLE_V1_MULTIPROCESSING": "0"})
    with described as engine:
        assert_reuses(engine, random_tokens(1, 1200))
        assert_reuses(engine, random_tokens(2, 2176))
        # Several at once: loads in front of one forward pass.
        prompts = [random_tokens(10 + index, 900) for index in range(6)]
        engine.generate(prompts)
        engine.reset()
        again = engine.generate(prompts)
        assert {answer.cached_tokens for answer in again} == {whole_blocks(900)}
        assert_at_rest(engine.reset())


def test_tensor_parallel_ranks_agree(
    launch: Launch, cores: list[int], small_model: Path, runtime_dir: Path
) -> None:
    if len(cores) < 2:
        pytest.skip("two ranks need two cores")
    described = launch(
        tensor_parallel_size=2,
        environment={"VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[1]}"},
        max_num_batched_tokens=4096,
        max_model_len=4096,
    )
    with described as engine:
        assert_reuses(engine, random_tokens(1, 1200), ranks=2)
        assert_sized(small_model, runtime_dir, ranks=2)
        assert_at_rest(engine.reset())


def _multi(*children: dict[str, Any]) -> dict[str, Any]:
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": list(children)},
    }


def _example(folder: Path) -> dict[str, Any]:
    return {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }


def test_first_child_of_a_multi_connector(launch: Launch, tmp_path: Path) -> None:
    described = launch(transfer=_multi(KV_TRANSFER, _example(tmp_path)), disable_hybrid_kv_cache_manager=True)
    with described as engine:
        assert_reuses(engine, random_tokens(1, 1200))
        assert_at_rest(engine.reset())


def test_second_child_of_a_multi_connector(launch: Launch, tmp_path: Path) -> None:
    """The other child serves what it holds; then kvferry gives its matches back, and still saves."""
    described = launch(transfer=_multi(_example(tmp_path), KV_TRANSFER), disable_hybrid_kv_cache_manager=True)
    with described as engine:
        prompt = random_tokens(1, 1200)
        engine.serve(prompt)
        reference = engine.serve(prompt, UNUSED)
        before = engine.reset()
        again = engine.serve(prompt)
        gained = difference(engine.reset(), before)
        assert again.cached_tokens == whole_blocks(1200)
        assert again.same_as(reference)
        assert gained["queries"] <= 1
        assert gained["hit_tokens"] == 0
        # The other child knows whole prompts only, so this one is ours.
        longer = prompt + random_tokens(2, 300)
        assert engine.serve(longer).cached_tokens == whole_blocks(1200)
        after = engine.reset()
        assert difference(after, before)["hit_tokens"] == whole_blocks(1200)
        assert_at_rest(after)
