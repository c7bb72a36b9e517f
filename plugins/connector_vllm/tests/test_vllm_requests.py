"""What a vLLM request turns into: options, identities, and what is not cached at all."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kvferry.runtime import PinRequest, RequestOptions
from kvferry.testing.fake_engine import EngineSettings
from kvferry.testing.fake_instance import InstanceSettings, key_chains
from kvferry_connector_vllm.requests import cacheable, lora_identity, options, request_state

if TYPE_CHECKING:
    from pathlib import Path

new_chain = key_chains(InstanceSettings(chunk_blocks=1, engine=EngineSettings(block_tokens=4)))


def request(**changes: Any) -> SimpleNamespace:
    values: dict[str, Any] = {
        "request_id": "r",
        "prompt_token_ids": [1, 2, 3, 4, 5],
        "prompt_embeds": None,
        "resumable": False,
        "all_token_ids": [1, 2, 3, 4, 5],
        "num_prompt_tokens": 5,
        "cache_salt": None,
        "lora_request": None,
        "kv_transfer_params": None,
        "mm_features": [],
        "num_preemptions": 0,
    }
    return SimpleNamespace(**{**values, **changes})


def first_key(**changes: Any) -> bytes:
    state = request_state(request(**changes), new_chain)
    state.extend_chain(5)
    return state.chain.keys[0]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"prompt_token_ids": None}, False),
        ({"prompt_token_ids": []}, False),
        ({"prompt_embeds": object()}, False),
        ({"resumable": True}, False),
    ],
)
def test_only_requests_known_by_their_tokens_are_cached(changes: dict[str, Any], expected: bool) -> None:
    assert cacheable(request(**changes)) is expected


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        (None, RequestOptions()),
        ({}, RequestOptions()),
        ({"kvferry.no_store": True}, RequestOptions(store=False)),
        ({"kvferry.no_load": True}, RequestOptions(load=False)),
        ({"kvferry.no_load": False, "kvferry.no_store": False}, RequestOptions()),
        ({"kvferry.no_load": "false"}, RequestOptions(load=False)),
        ({"do_remote_prefill": True, "remote_host": "h"}, RequestOptions(load=False)),
        ({"do_remote_decode": True}, RequestOptions()),
    ],
)
def test_a_client_may_switch_loading_and_storing_off(
    parameters: dict[str, Any] | None, expected: RequestOptions
) -> None:
    assert options(parameters) == expected


def test_no_two_tenants_share_a_key() -> None:
    assert len({first_key(), first_key(cache_salt="a"), first_key(cache_salt="b")}) == 3


def test_no_two_adapters_share_a_key(tmp_path: Path) -> None:
    def adapter(name: str, path: Path) -> SimpleNamespace:
        return SimpleNamespace(lora_name=name, lora_path=str(path))

    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        folder.mkdir()
        (folder / "adapter_model.safetensors").write_bytes(b"w")
    keys = {
        first_key(lora_request=lora)
        for lora in (None, adapter("a", one), adapter("b", one), adapter("a", two))
    }
    assert len(keys) == 4


def test_new_weights_under_an_old_name_are_another_adapter(tmp_path: Path) -> None:
    weights = tmp_path / "adapter_model.safetensors"
    lora = SimpleNamespace(lora_name="a", lora_path=str(tmp_path))
    weights.write_bytes(b"old!")
    os.utime(weights, ns=(1, 1))
    before = lora_identity(lora)
    assert lora_identity(lora) == before
    weights.write_bytes(b"new!")
    os.utime(weights, ns=(2, 2))
    assert lora_identity(lora) != before


def test_media_enter_the_key_where_they_lie() -> None:
    def feature(identifier: str) -> SimpleNamespace:
        return SimpleNamespace(identifier=identifier, mm_position=SimpleNamespace(offset=1, length=2))

    assert first_key() != first_key(mm_features=[feature("x")]) != first_key(mm_features=[feature("y")])
    assert first_key(mm_features=[feature("x")]) == first_key(mm_features=[feature("x")])


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("10min", PinRequest("r", 600.0)),
        ({"for": "2h"}, PinRequest("r", 7200.0)),
        ({"name": "system prompt", "for": "30s"}, PinRequest("system prompt", 30.0)),
        (None, None),
    ],
)
def test_a_client_may_pin_what_its_request_uses(value: Any, expected: PinRequest | None) -> None:
    assert options({"kvferry.pin": value}, "r").pin == expected


def test_a_client_may_say_how_long_its_chunks_live() -> None:
    assert options({"kvferry.ttl": "90s"}) == RequestOptions(ttl=90.0)


@pytest.mark.parametrize("key", ["kvferry.pin", "kvferry.ttl"])
@pytest.mark.parametrize(
    "value",
    ["soon", "0s", "-5s", 600, True, ["10min"], {"name": "p"}, {"fro": "1h"}, {"name": "", "for": "1h"}],
)
def test_a_wish_that_cannot_be_read_is_one_warning_and_the_request_goes_on(
    key: str, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert options({key: value, "kvferry.no_load": True}, "request-7") == RequestOptions(load=False)
    (record,) = caplog.records
    assert "request-7" in record.getMessage()
    assert key in record.getMessage()


def test_a_request_remembers_its_adapter_for_operators(tmp_path: Path) -> None:
    lora = SimpleNamespace(lora_name="chat", lora_path=str(tmp_path))
    assert request_state(request(lora_request=lora), new_chain).model == "chat"
    assert request_state(request(), new_chain).model == ""
