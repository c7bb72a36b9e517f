"""What differs between the releases of vLLM that this connector runs on, asked by feature.

Read in vLLM 0.23 and 0.32. Two more differences need no question, because what the older one demands is
right for both: it calls ``wait_for_save`` in steps with a forward pass only
(``v1/worker/kv_connector_model_runner_mixin.py``; see :meth:`WorkerRole.submit_saves`), and its scheduler
does not name the requests that a reset of the prefix cache preempted (``v1/core/sched/scheduler.py``;
see :meth:`SchedulerRole.step`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import field, frozen

if TYPE_CHECKING:
    from vllm.v1.request import Request

try:
    # distributed/kv_transfer/kv_connector/v1/base.py: together with what was transferred, vLLM is told
    # which requests' loads failed.
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorTransferResults as TransferResults,
    )

    FAILURES_BY_REQUEST = True
except ImportError:
    # vLLM 0.23 asks get_finished() alone, and takes failures as a set of blocks.
    @frozen
    class TransferResults:  # type: ignore[no-redef]
        """What was transferred, by request id."""

        finished_sending: set[str] = field(factory=set)
        finished_recving: set[str] = field(factory=set)
        failed_recving: set[str] = field(factory=set)

    FAILURES_BY_REQUEST = False


def cache_hit_source() -> Any:
    """What vLLM calls hits in host memory in its own statistics; None where it does not ask."""
    try:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource
    except ImportError:
        return None
    return CacheHitSource.HOST


def in_flight_tokens(request: Request) -> int:
    """Of the request's computed tokens, how many are not known to be computed yet.

    vLLM 0.23 counts what it expects to sample only (``v1/core/sched/async_scheduler.py``). The rest are
    tokens of a prompt, and a save is executed behind every step that was scheduled before it.
    """
    found: int = getattr(request, "num_in_flight_tokens", request.num_output_placeholders)
    return found


__all__ = ["FAILURES_BY_REQUEST", "TransferResults", "cache_hit_source", "in_flight_tokens"]
