"""What vLLM serves, as far as keys depend on it: whatever changes the KV values changes the namespace."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: make test installs it")
pytest.importorskip("vllm", reason="vLLM is not installed: make test installs it")

from kvferry.control.identity import Namespace  # noqa: E402
from kvferry_connector_vllm.engine import geometry, model_identity  # noqa: E402


class ModelConfiguration(dict[str, Any]):
    """Stands for a configuration of transformers."""

    def to_json_string(self, use_diff: bool) -> str:
        assert not use_diff, "defaults of the installed release would be left out"
        return json.dumps(self, sort_keys=True)


def namespace(**changes: Any) -> bytes:
    """The namespace of an engine like the first one, except for these changes."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    values: dict[str, Any] = {
        "model": "org/model",
        "revision": "1",
        "rope": 10_000,
        "quantization": None,
        "dtype": torch.bfloat16,
        "cache_dtype": "auto",
        "kv_dtype": torch.bfloat16,
        "heads": 4,
        "head_size": 128,
        "layers": 28,
        "window": None,
        "chunk_tokens": 256,
        "block_tokens": 16,
        "tensor_parallel": 1,
        "speculation": None,
        **changes,
    }
    shape = {"block_size": values["block_tokens"], "head_size": values["head_size"]}
    shape |= {"num_kv_heads": values["heads"] // values["tensor_parallel"], "dtype": values["kv_dtype"]}
    spec = FullAttentionSpec(**shape)
    if values["window"]:
        spec = SlidingWindowSpec(**shape, sliding_window=values["window"])
    model = SimpleNamespace(
        model=values["model"],
        hf_config=ModelConfiguration(rope_theta=values["rope"]),
        quantization=values["quantization"],
        dtype=values["dtype"],
        get_total_num_hidden_layers=lambda: values["layers"],
        get_total_num_kv_heads=lambda: values["heads"],
    )
    config = SimpleNamespace(
        model_config=model,
        cache_config=SimpleNamespace(cache_dtype=values["cache_dtype"]),
        speculative_config=values["speculation"],
    )
    names = [f"layers.{number}" for number in range(values["layers"])]
    groups = SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=names, kv_cache_spec=spec)])
    return Namespace(
        model=model_identity(config),
        revision=values["revision"],
        geometry=geometry(config, groups, values["chunk_tokens"]),
    ).digest


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "org/other"},
        {"revision": "2"},
        {"rope": 500_000},
        {"quantization": "fp8"},
        {"dtype": torch.float16},
        {"cache_dtype": "fp8_e4m3", "kv_dtype": torch.uint8},
        {"cache_dtype": "fp8_e5m2", "kv_dtype": torch.uint8},
        {"kv_dtype": torch.float16},
        {"heads": 8},
        {"head_size": 64},
        {"head_size": 64, "heads": 8},
        {"layers": 27},
        {"window": 512},
        {"window": 1024},
        {"chunk_tokens": 512},
    ],
    ids=str,
)
def test_engines_whose_kv_differs_share_nothing(changes: dict[str, Any]) -> None:
    """An fp8 cache must not read what a bf16 cache wrote, or two fp8 kinds each other's
    (LMCache#1856)."""
    assert namespace(**changes) != namespace()


def test_two_kinds_of_fp8_in_bytes_of_one_type_share_nothing() -> None:
    kinds = {namespace(cache_dtype=kind, kv_dtype=torch.uint8) for kind in ("fp8_e4m3", "fp8_e5m2", "int8")}
    assert len(kinds) == 3


@pytest.mark.parametrize("changes", [{"block_tokens": 128}, {"tensor_parallel": 2}], ids=str)
def test_how_an_engine_cuts_its_memory_is_no_part_of_the_identity(changes: dict[str, Any]) -> None:
    assert namespace(**changes) == namespace()


def speculation(method: str, draft: str, revision: str | None = None) -> SimpleNamespace:
    configuration = ModelConfiguration(num_hidden_layers=1)
    model = SimpleNamespace(
        model=draft, revision=revision, hf_config=configuration, quantization=None, dtype=torch.bfloat16
    )
    return SimpleNamespace(method=method, draft_model_config=model)


def test_a_draft_model_whose_kv_cache_is_kept_too_is_part_of_the_namespace() -> None:
    drafts = [
        None,
        speculation("eagle3", "org/draft"),
        speculation("eagle3", "org/other-draft"),
        speculation("eagle3", "org/draft", "2"),
        speculation("deepseek_mtp", "org/draft"),
    ]
    assert len({namespace(speculation=draft) for draft in drafts}) == len(drafts)


@pytest.mark.parametrize("method", ["ngram", "ngram_gpu", "suffix"])
def test_speculation_without_a_kv_cache_of_its_own_changes_nothing(method: str) -> None:
    assert namespace(speculation=speculation(method, "org/model")) == namespace()
