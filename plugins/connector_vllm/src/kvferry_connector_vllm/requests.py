"""A vLLM request as kvferry sees it."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any, TypeVar

from kvferry.api.units import parse_duration
from kvferry.runtime import KeyChain, LoRAIdentity, MediaItem, PinRequest, RequestOptions, RequestState

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from vllm.lora.request import LoRARequest
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

Wish = TypeVar("Wish")

NO_STORE = "kvferry.no_store"
NO_LOAD = "kvferry.no_load"
PIN = "kvferry.pin"
TTL = "kvferry.ttl"
LONGEST_PIN_NAME = 200


def cacheable(request: Request) -> bool:
    """Whether the request's content is known by token ids alone, and stays what it is.

    A resumable request (streaming input) takes sampled tokens back when more input arrives.
    """
    return (
        bool(request.prompt_token_ids)
        and request.prompt_embeds is None
        and not getattr(request, "resumable", False)
    )


def options(parameters: Mapping[str, Any] | None, request_id: str = "") -> RequestOptions:
    """What ``kv_transfer_params`` ask for.

    Parameters of a remote prefill belong to another connector, which brings the same KV cache: the
    question for a load is then answered at once with zero. A wish that cannot be read is warned of and
    left out; the request goes on.
    """
    if not parameters:
        return RequestOptions()
    return RequestOptions(
        store=not _switch(parameters, NO_STORE),
        load=not (parameters.get("do_remote_prefill") or _switch(parameters, NO_LOAD)),
        pin=_wish(parameters, PIN, request_id, lambda value: _pin(value, request_id)),
        ttl=_wish(parameters, TTL, request_id, _seconds),
    )


def _switch(parameters: Mapping[str, Any], name: str) -> bool:
    value = parameters.get(name, False)
    if isinstance(value, bool):
        return value
    logger.warning("kvferry: %s must be true or false, not %r; taken as true", name, value)
    return True


def _wish(
    parameters: Mapping[str, Any], name: str, request_id: str, parse: Callable[[Any], Wish]
) -> Wish | None:
    value = parameters.get(name)
    if value is None:
        return None
    try:
        return parse(value)
    except ValueError as error:
        logger.warning("kvferry: request %s: %s is ignored: %s", request_id, name, error)
        return None


def _pin(value: Any, request_id: str) -> PinRequest:
    """``"10min"`` under the request's own id, or ``{"name": ..., "for": "10min"}``."""
    if not isinstance(value, dict):
        return PinRequest(request_id, _seconds(value))
    if unknown := sorted(set(map(str, value)) - {"name", "for"}):
        raise ValueError(f"unknown key {unknown[0]!r}; known are 'name' and 'for'")
    name = value.get("name", request_id)
    if not isinstance(name, str) or not 0 < len(name) <= LONGEST_PIN_NAME:
        raise ValueError(f"a pin's name is a text of 1 to {LONGEST_PIN_NAME} characters")
    return PinRequest(name, _seconds(value.get("for")))


def _seconds(value: Any) -> float:
    if not isinstance(value, str):
        raise ValueError(f"a duration is a text such as '10min', not {value!r:.40}")  # noqa: TRY004
    seconds = parse_duration(value)
    if seconds <= 0:
        raise ValueError("a duration is above zero")
    return seconds


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
        options=options(request.kv_transfer_params, request.request_id),
        model=request.lora_request.lora_name if request.lora_request is not None else "",
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
