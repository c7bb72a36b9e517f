"""The scheduler's half of the connector."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from attrs import asdict, define, field
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvferry.runtime import (
    KVFerryError,
    SchedulerRuntime,
    StepPlan,
)
from kvferry_connector_vllm.events import kv_cache_event
from kvferry_connector_vllm.requests import cacheable, request_state
from kvferry_connector_vllm.startup import Startup
from kvferry_connector_vllm.stats import KVFerryStats, Totals, scheduler_lower, scheduler_sharing
from kvferry_connector_vllm.versions import in_flight_tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

_LOWER_COUNTED = (
    "risen_tokens",
    "waits",
    "waits_expired",
    "wait_seconds",
    "rises_shared",
    "rises_expired",
    "rises_under_way",
)


@define
class KVFerryMetadata(KVConnectorMetadata):
    """What travels to every worker with a step."""

    plan: StepPlan
    failures_seen: dict[int, int] = field(factory=dict)
    """Per rank, how many failed synchronous loads the scheduler knew of."""


@define
class KVFerryWorkerMetadata(KVConnectorWorkerMetadata):
    """What travels back: per rank, how many synchronous loads failed so far."""

    failures: dict[int, int] = field(factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, KVFerryWorkerMetadata)
        return KVFerryWorkerMetadata({**self.failures, **other.failures})


class SchedulerRole:
    """Turns vLLM's calls into calls of :class:`~kvferry.runtime.SchedulerRuntime`.

    All methods run on the scheduler's thread. Without a runtime (a model whose KV cache kvferry
    cannot restore) every question is answered with "nothing".
    """

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        self._startup = Startup(vllm_config, kv_cache_config)
        self._runtime: SchedulerRuntime | None = None
        self._failures_seen: dict[int, int] = {}
        self._totals = Totals("scheduler")
        self._requests: dict[str, Request] = {}
        self._preemptions: dict[str, int] = {}
        """By request, those that the runtime was told of."""

    def open(self) -> None:
        """Check the configuration and start. Raises what ``kvferry check`` would print."""
        self._runtime = self._startup.open_scheduler()

    def close(self) -> None:
        if self._runtime is not None:
            self._runtime.close()

    def follow(self, request: Request) -> None:
        runtime = self._runtime
        if runtime is None or runtime.knows(request.request_id) or not cacheable(request):
            return
        runtime.add_request(request_state(request, self._startup.new_chain))
        self._requests[request.request_id] = request
        self._preemptions[request.request_id] = request.num_preemptions

    def match(self, request: Request, local_tokens: int) -> tuple[int | None, bool]:
        if self._runtime is None:
            return 0, False
        self.follow(request)
        try:
            found = self._runtime.match(
                request.request_id, local_tokens, request.num_preemptions, request.num_tokens
            )
        except KVFerryError as error:
            logger.warning("kvferry: request %s is not cached: %s", request.request_id, error)
            self._runtime.forget(request.request_id)
            return 0, False
        if found is None:
            return None, False
        return found, found > 0 and self._runtime.loads_beside(request.request_id)

    def allocated(self, request: Request, blocks: KVCacheBlocks, external_tokens: int) -> None:
        if self._runtime is not None:
            # A load's blocks are known here only: the request is in no scheduler output until its
            # load has ended. Saves never use them.
            self._runtime.allocated(request.request_id, external_tokens, blocks.get_block_ids())

    def step(self, output: SchedulerOutput) -> KVFerryMetadata:
        runtime = self._runtime
        if runtime is None:
            return KVFerryMetadata(StepPlan())
        self._tell_preemptions(runtime)
        for new in output.scheduled_new_reqs:
            self._scheduled(output, new.req_id, new.num_computed_tokens, new.block_ids, replace=True)
        cached = output.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            self._scheduled(
                output,
                request_id,
                cached.num_computed_tokens[index],
                cached.new_block_ids[index],
                replace=request_id in cached.resumed_req_ids,
            )
        plan = runtime.step_plan(output.num_scheduled_tokens)
        return KVFerryMetadata(plan, dict(self._failures_seen))

    def _tell_preemptions(self, runtime: SchedulerRuntime) -> None:
        """Counted, because the output of vLLM 0.23 leaves out those of a reset of the prefix cache, whose
        blocks may be overwritten in this step as well."""
        for request_id, request in self._requests.items():
            if request.num_preemptions != self._preemptions[request_id]:
                self._preemptions[request_id] = request.num_preemptions
                runtime.preempted(request_id)

    def _scheduled(
        self,
        output: SchedulerOutput,
        request_id: str,
        computed: int,
        blocks: Sequence[Sequence[int]] | None,
        *,
        replace: bool,
    ) -> None:
        assert self._runtime is not None
        request = self._requests.get(request_id)
        if request is None:
            # Not followed, but its blocks may have been another's until now.
            self._runtime.taken(blocks or ())
            return
        self._runtime.scheduled(
            request_id,
            computed + output.num_scheduled_tokens[request_id],
            blocks,
            replace_blocks=replace,
            known_tokens=request.num_tokens,
            computed_before=computed,
        )

    def reported(self, output: KVConnectorOutput) -> None:
        metadata = output.kv_connector_worker_meta
        if isinstance(metadata, KVFerryWorkerMetadata):
            self._failures_seen.update(metadata.failures)

    def finished(self, request: Request, blocks: tuple[list[int], ...]) -> bool:
        self._requests.pop(request.request_id, None)
        self._preemptions.pop(request.request_id, None)
        if self._runtime is None:
            return False
        # Tokens of a step that is still in flight may yet be rejected.
        computed = request.num_computed_tokens - in_flight_tokens(request)
        return self._runtime.finished(request.request_id, blocks, computed, request.num_tokens)

    def clear(self) -> None:
        if self._runtime is not None:
            self._runtime.clear()

    def take_events(self) -> list[KVCacheEvent]:
        """What vLLM is to publish; nothing is recorded unless its ``kv_events_config`` says so."""
        if self._runtime is None or not self._startup.events:
            return []
        chunk_tokens = self._startup.check().config.chunk_tokens
        return [kv_cache_event(event, chunk_tokens) for event in self._runtime.take_events()]

    def take_stats(self) -> KVFerryStats | None:
        """Totals since start, and gauges."""
        if self._runtime is None:
            return None
        totals, manager = self._runtime.statistics()
        counters = {
            **asdict(totals),
            "evictions": manager.evictions,
            "over_quota": manager.over_quota,
            "ended": manager.ended,
            "pins_refused": manager.pins_refused,
        }
        gauges = {
            "resident_chunks": manager.resident,
            "free_slots": manager.free,
            "capacity_slots": manager.capacity,
            "pinned_slots": manager.pinned,
        }
        lower, sharing = self._runtime.lower_statistics(), self._runtime.sharing_statistics()
        shared = {} if sharing is None else scheduler_sharing(sharing)
        if lower is None:
            return self._totals.report({**counters, **gauges, **shared})
        waits = {name: getattr(lower, name) for name in _LOWER_COUNTED}
        return self._totals.report(
            {**counters, **gauges, **waits, **shared},
            {tier.name: scheduler_lower(tier) for tier in lower.tiers},
        )
