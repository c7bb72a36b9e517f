"""vLLM's KV cache tensors as planes of pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kvferry.api import ErrorKind, KVFerryError
from kvferry.runtime import EngineGroup, PagePlane

if TYPE_CHECKING:
    import torch
    from vllm.v1.kv_cache_interface import KVCacheConfig


def engine_groups(
    kv_caches: Mapping[str, torch.Tensor | Sequence[torch.Tensor]], config: KVCacheConfig
) -> list[EngineGroup]:
    """The groups that vLLM registered, layers in the order of the KV cache configuration.

    A layer is one tensor whose first dimension counts blocks, or an equal number of pieces of each
    block; one tensor ``(2, blocks, ...)`` with K and V apart; or a sequence of tensors whose first
    dimensions count blocks (vLLM-Ascend). Layers that share another layer's cache appear once. Raises
    :class:`KVFerryError` (``UNSUPPORTED``) for a group without a layer on this rank, for
    any other shape and for pages that are not dense.
    """
    groups: list[EngineGroup] = []
    for group in config.kv_cache_groups:
        planes: list[PagePlane] = []
        seen: set[int] = set()
        for layer in group.layer_names:
            for plane in _planes(layer, kv_caches[layer], config.num_blocks):
                if plane.address not in seen:
                    seen.add(plane.address)
                    planes.append(plane)
        if not planes:
            raise _unsupported(f"KV cache group {len(groups)}", "no layer of it lives on this rank")
        groups.append(EngineGroup(block_tokens=group.kv_cache_spec.block_size, planes=tuple(planes)))
    return groups


def _planes(layer: str, cache: torch.Tensor | Sequence[torch.Tensor], blocks: int) -> list[PagePlane]:
    import torch

    if not isinstance(cache, torch.Tensor):
        return [plane for tensor in cache for plane in _planes(layer, tensor, blocks)]
    shape = tuple(cache.shape)
    if shape and shape[0] == blocks:
        return [_plane(layer, cache, blocks)]
    if len(shape) > 1 and shape[0] == 2 and shape[1] == blocks:
        return [_plane(layer, cache[0], blocks), _plane(layer, cache[1], blocks)]
    if shape and shape[0] and shape[0] % blocks == 0:
        # The attention kernel works on smaller blocks than the block tables.
        return [_plane(layer, cache.unflatten(0, (blocks, -1)), blocks)]
    raise _unsupported(
        f"the KV cache of layer {layer}",
        f"a tensor of shape {shape} has no dimension that counts {blocks} blocks",
    )


def _plane(layer: str, tensor: torch.Tensor, blocks: int) -> PagePlane:
    page = tensor[0]
    extent = 1 + sum((size - 1) * stride for size, stride in zip(page.shape, page.stride(), strict=True))
    if extent != page.numel():
        why = f"a page of shape {tuple(page.shape)} is not dense: {page.stride()}"
        raise _unsupported(f"the KV cache of layer {layer}", why)
    size = tensor.element_size()
    return PagePlane(
        layer=layer,
        address=tensor.data_ptr(),
        stride=tensor.stride(0) * size,
        page_bytes=page.numel() * size,
        blocks=blocks,
        form=f"{tensor.dtype} {tuple(page.shape)} {page.stride()}",
        keep_alive=tensor,
    )


def _unsupported(what: str, why: str) -> KVFerryError:
    return KVFerryError(
        f"kvferry cannot read {what}",
        kind=ErrorKind.UNSUPPORTED,
        where="vLLM",
        why=why,
        remedy="serve this model without kvferry, and report its attention backend",
    )
