"""vLLM's API server with nothing but a transfer configuration and ``KVFERRY_CONFIG``."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.demo.prompts import random_tokens
from tests.e2e.api_server import ApiServer, api_server
from tests.e2e.checks import whole_blocks
from tests.engines import KV_TRANSFER, UNUSED, engine_environment, write_config

RESET_SECONDS = 30.0


@pytest.fixture(scope="module")
def server(
    small_model: Path, runtime_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ApiServer]:
    folder = tmp_path_factory.mktemp("server")
    config = write_config(folder / "kvferry.yaml", runtime_dir=runtime_dir, capacity="64MiB")
    arguments = ["--kv-transfer-config", json.dumps(KV_TRANSFER), "--enforce-eager"]
    arguments += ["--block-size", "128", "--max-model-len", "4096", "--dtype", "bfloat16"]
    # Without it vLLM kills its engine at once, which nobody can tidy up after.
    arguments += ["--shutdown-timeout", "20"]
    arguments += ["--enable-prompt-tokens-details", "--enable-prefix-caching"]
    environment = engine_environment(KVFERRY_CONFIG=str(config), VLLM_SERVER_DEV_MODE="1")
    with api_server(small_model, arguments, environment, folder / "server.log") as server:
        yield server


def _reset(server: ApiServer) -> None:
    """Saves hold their blocks, and vLLM drops its prefix cache only when no block is in use: so the
    reset is repeated until a prompt that was in the cache is no longer found there."""
    probe = random_tokens(0, 300)
    deadline = time.monotonic() + RESET_SECONDS
    while time.monotonic() < deadline:
        server.complete(probe, max_tokens=2, kv_transfer_params=UNUSED)
        server.request("/reset_prefix_cache", b"")
        if _cached(server.complete(probe, max_tokens=2, kv_transfer_params=UNUSED)) == 0:
            return
    raise TimeoutError("the server's prefix cache could not be reset")


def _cached(response: dict[str, Any]) -> int:
    details = response["usage"]["prompt_tokens_details"]
    return int(details["cached_tokens"] or 0) if details else 0


def test_second_request_is_a_hit_with_the_same_answer(server: ApiServer) -> None:
    prompt = random_tokens(1, 1500)
    cold = server.complete(prompt)
    assert _cached(cold) == 0
    reference = server.complete(prompt, kv_transfer_params=UNUSED)
    _reset(server)
    ours = server.complete(prompt)
    assert _cached(ours) == _cached(reference) == whole_blocks(1500)
    for key in ("token_ids", "logprobs", "text"):
        assert ours["choices"][0][key] == reference["choices"][0][key]


def test_metrics_endpoint_shows_kvferry(server: ApiServer) -> None:
    before = server.metrics()
    prompt = random_tokens(2, 1000)
    server.complete(prompt)
    _reset(server)
    server.complete(prompt)
    _reset(server)
    after = server.metrics()
    gained = {name: after[name] - before.get(name, 0) for name in after}
    assert gained["kvferry:saved_tokens_total"] == whole_blocks(1000)
    assert gained["kvferry:hit_tokens_total"] == whole_blocks(1000)
    assert gained["kvferry:loaded_bytes_total"] > 0
    assert after["kvferry:capacity_slots"] > 0
