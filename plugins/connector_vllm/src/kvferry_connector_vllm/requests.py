"""A vLLM request as kvferry sees it."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

from attrs import evolve

from kvferry.runtime import KeyChain, LoRAIdentity, MediaItem, RequestOptions, RequestState

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from vllm.lora.request import LoRARequest
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

NO_STORE = "kvferry.no_store"
NO_LOAD = "kvferry.no_load"


def cacheable(request: Request) -> bool:
    """Whether the request's content is known by token ids alone, and stays what it is.

    A resumable request (streaming input) takes sampled tokens back when more input arrives.
    """
    return (
        bool(request.prompt_token_ids)
        and request.prompt_embeds is None
        and not getattr(request, "resumable", False)
    )


def options(parameters: Mapping[str, Any] | None) -> RequestOptions:
    """What ``kv_transfer_params`` ask for.

    Parameters of a remote prefill belong to another connector, which brings the same KV cache: the
    question for a load is then answered at once with zero.
    """
    if not parameters:
        return RequestOptions()
    wanted = RequestOptions(load=not parameters.get("do_remote_prefill"))
    for name, field in ((NO_STORE, "store"), (NO_LOAD, "load")):
        value = parameters.get(name, False)
        if not isinstance(value, bool):
            logger.warning("kvferry: %s must be true or false, not %r; taken as true", name, value)
            value = True
        if value:
            wanted = evolve(wanted, **{field: False})
    return wanted


def lora_identity(lora: LoRARequest | None) -> LoRAIdentity | None:
    """Name, path and the state of the adapter's files, so that new weights under an old name do not
    find old KV cache."""
    if lora is None:
        return None
    state = ""
    for name in ("adapter_model.safetensors", "adapter_model.bin", "adapter_config.json"):
        try:
            status = os.stat(os.path.join(lora.lora_path, name))
        except OSError:
            continue
        state += f"|{name}:{status.st_size}:{status.st_mtime_ns}"
    return LoRAIdentity(name=lora.lora_name, version=lora.lora_path + state)


def request_state(
    request: Request, new_chain: Callable[[str, LoRAIdentity | None], KeyChain]
) -> RequestState:
    """Begin to follow a request. It must be cacheable."""
    salt = request.cache_salt or ""
    return RequestState(
        id=request.request_id,
        tokens=request.all_token_ids,
        prompt_tokens=request.num_prompt_tokens,
        chain=new_chain(salt, lora_identity(request.lora_request)),
        salt=salt,
        options=options(request.kv_transfer_params),
        media=tuple(
            MediaItem(
                identifier=feature.identifier,
                start=feature.mm_position.offset,
                length=feature.mm_position.length,
            )
            for feature in request.mm_features
        ),
        preemptions=request.num_preemptions,
    )
