"""vLLM's tensors become planes whose addresses are the tensors' own bytes."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: make test installs it")

from kvferry.api import ErrorKind, KVFerryError  # noqa: E402
from kvferry_connector_vllm.pages import engine_groups  # noqa: E402

BLOCKS, HEADS, TOKENS, SIZE = 7, 2, 4, 3


def config(*groups: list[str]) -> SimpleNamespace:
    spec = SimpleNamespace(block_size=TOKENS)
    return SimpleNamespace(
        num_blocks=BLOCKS,
        kv_cache_groups=[SimpleNamespace(layer_names=list(names), kv_cache_spec=spec) for names in groups],
    )


def numbered(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=dtype).reshape(shape)


def page(plane: object, block: int) -> bytes:
    return ctypes.string_at(plane.address + block * plane.stride, plane.page_bytes)


def page_values(plane: object, block: int) -> list[float]:
    return sorted(torch.frombuffer(bytearray(page(plane, block)), dtype=torch.float32).tolist())


def test_one_fused_tensor_per_layer_is_one_plane() -> None:
    cache = numbered(BLOCKS, HEADS, TOKENS, 2 * SIZE)
    (group,) = engine_groups({"a": cache}, config(["a"]))
    (plane,) = group.planes
    assert group.block_tokens == TOKENS
    for block in range(BLOCKS):
        assert page_values(plane, block) == cache[block].flatten().tolist()


def test_k_before_v_in_one_tensor_is_two_planes() -> None:
    cache = numbered(2, BLOCKS, TOKENS, HEADS, SIZE)
    (group,) = engine_groups({"a": cache}, config(["a"]))
    k, v = group.planes
    for block in range(BLOCKS):
        assert page_values(k, block) == cache[0, block].flatten().tolist()
        assert page_values(v, block) == cache[1, block].flatten().tolist()
    assert group.block_bytes == 2 * TOKENS * HEADS * SIZE * 4


def test_separate_k_and_v_tensors_are_two_planes() -> None:
    k, v = numbered(BLOCKS, TOKENS, HEADS, SIZE), 1000 + numbered(BLOCKS, TOKENS, HEADS, SIZE)
    (group,) = engine_groups({"a": (k, v)}, config(["a"]))
    assert [page_values(plane, 5) for plane in group.planes] == [
        k[5].flatten().tolist(),
        v[5].flatten().tolist(),
    ]


def test_layers_inside_one_allocation_keep_their_stride() -> None:
    whole = numbered(BLOCKS, 2, HEADS * TOKENS * SIZE)  # block-major: both layers of a block side by side
    caches = {name: whole[:, index] for index, name in enumerate("ab")}
    (group,) = engine_groups(caches, config(["a", "b"]))
    first, second = group.planes
    assert first.stride == 2 * first.page_bytes
    assert page_values(second, 3) == whole[3, 1].tolist()


def test_a_permuted_but_dense_page_is_copied_whole() -> None:
    stored = numbered(BLOCKS, TOKENS, HEADS, SIZE)
    seen = stored.permute(0, 2, 1, 3)
    (group,) = engine_groups({"a": seen}, config(["a"]))
    assert page_values(group.planes[0], 2) == stored[2].flatten().tolist()


def test_layers_that_share_a_cache_are_copied_once() -> None:
    cache = numbered(BLOCKS, HEADS, TOKENS, SIZE)
    (group,) = engine_groups({"a": cache, "b": cache}, config(["a", "b"]))
    assert len(group.planes) == 1


def test_groups_keep_their_own_layers() -> None:
    caches = {name: numbered(BLOCKS, HEADS, TOKENS, SIZE) for name in "abc"}
    groups = engine_groups(caches, config(["b"], ["a", "c"]))
    assert [[plane.layer for plane in group.planes] for group in groups] == [["b"], ["a", "c"]]


@pytest.mark.parametrize(
    "cache",
    [
        numbered(BLOCKS + 1, HEADS, TOKENS, SIZE),
        numbered(HEADS, TOKENS, SIZE),
        numbered(BLOCKS, HEADS, TOKENS, 2 * SIZE)[..., :SIZE],
    ],
    ids=["another number of blocks", "no block dimension", "pages with holes"],
)
def test_any_other_shape_is_refused_with_the_layer(cache: torch.Tensor) -> None:
    with pytest.raises(KVFerryError, match=r"KV cache of layer model\.layers\.0") as raised:
        engine_groups({"model.layers.0": cache}, config(["model.layers.0"]))
    assert raised.value.kind is ErrorKind.UNSUPPORTED
    assert raised.value.why
