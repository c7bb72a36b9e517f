"""kvferry's events as vLLM publishes them."""

from __future__ import annotations

import msgspec
import pytest

from kvferry.runtime import ForgetAll, LoRAIdentity, MediaItem, RemovedChunks, StoredRun
from kvferry.runtime.events import ChunkContent
from kvferry.testing.fake_engine import EngineSettings
from kvferry.testing.fake_instance import InstanceSettings, key_chains

pytest.importorskip("vllm", reason="vLLM is not installed: make test installs it")

from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
)

from kvferry_connector_vllm.events import kv_cache_event

CHUNK = 4
new_chain = key_chains(InstanceSettings(chunk_blocks=1, engine=EngineSettings(block_tokens=CHUNK)))


@pytest.fixture(autouse=True)
def bytes_for_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")


def stored(first: int, stop: int, *, salt: str = "", model: str = "", media: bool = False) -> StoredRun:
    chain = new_chain(salt, LoRAIdentity(name=model, version="1") if model else None)
    item = MediaItem(identifier="cat", start=3, length=4)
    chain.extend(list(range(100, 100 + CHUNK * stop)), media=[item] if media else [])
    return StoredRun(
        digests=tuple(chain.keys[first:stop]),
        parent=chain.keys[first - 1] if first else None,
        depth=first,
        salt=salt,
        model=model,
        contents=tuple(ChunkContent.of(chain, chunk) for chunk in range(first, stop)),
    )


def test_a_run_of_chunks_is_one_event_with_all_its_tokens_and_its_true_parent() -> None:
    run = stored(1, 3)
    event = kv_cache_event(run, CHUNK)
    assert isinstance(event, BlockStored)
    assert event.block_hashes == list(run.digests)
    assert event.parent_block_hash == run.parent
    assert event.token_ids == list(range(104, 112))
    assert (event.block_size, event.medium, event.lora_name, event.extra_keys) == (CHUNK, "CPU", None, None)
    head = kv_cache_event(stored(0, 1), CHUNK)
    assert isinstance(head, BlockStored)
    assert head.parent_block_hash is None


def test_salt_adapter_and_media_stand_where_vllm_puts_them() -> None:
    event = kv_cache_event(stored(0, 3, salt="s", model="m", media=True), CHUNK)
    assert isinstance(event, BlockStored)
    assert event.lora_name == "m"
    assert event.extra_keys == [("m", ("cat", 3), "s"), ("m", ("cat", -1)), ("m",)]
    plain = kv_cache_event(stored(0, 2, salt="s"), CHUNK)
    assert isinstance(plain, BlockStored)
    assert plain.extra_keys == [("s",), None]


def test_removals_and_a_loss_have_events_of_their_own() -> None:
    gone = kv_cache_event(RemovedChunks((b"a" * 32, b"b" * 32)), CHUNK)
    assert isinstance(gone, BlockRemoved)
    assert (gone.block_hashes, gone.medium) == ([b"a" * 32, b"b" * 32], "CPU")
    assert isinstance(kv_cache_event(ForgetAll(), CHUNK), AllBlocksCleared)


@pytest.mark.parametrize("numbers", [False, True])
def test_hashes_are_what_vllms_own_events_have(numbers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", str(int(numbers)))
    event = kv_cache_event(stored(0, 2), CHUNK)
    assert isinstance(event, BlockStored)
    assert {type(each) for each in event.block_hashes} == {int if numbers else bytes}
    batch = KVEventBatch(ts=0.0, events=[event])
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=KVEventBatch)
    assert again.events == [event]
