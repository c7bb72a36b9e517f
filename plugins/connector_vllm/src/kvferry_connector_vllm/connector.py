"""``KVFerryConnector``: vLLM's KV transfer interface, driven by :mod:`kvferry.runtime`.

One class, built once in the scheduler's process and once in every worker; the two roles share no
state. Facts about the interface: vLLM 0.32, ``vllm/distributed/kv_transfer/kv_connector/v1``; where
0.23 differs, :mod:`kvferry_connector_vllm.versions` says so.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    SupportsHMA,
)

from kvferry_connector_vllm.scheduler_role import KVFerryMetadata, KVFerryWorkerMetadata, SchedulerRole
from kvferry_connector_vllm.stats import KVFerryPromMetrics, KVFerryStats
from kvferry_connector_vllm.versions import TransferResults, cache_hit_source
from kvferry_connector_vllm.worker_role import WorkerRole

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorMetadata,
        KVConnectorWorkerMetadata,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


class KVFerryConnector(KVConnectorBase_V1, SupportsHMA):
    """Keeps the KV cache of prompts and answers in kvferry's tiers.

    Best effort by nature: a request never fails because of it. Start-up is different: a
    configuration that breaks a rule stops the engine, in both roles with the same text.
    """

    _cache_hit_source = cache_hit_source()

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._scheduler: SchedulerRole | None = None
        self._worker: WorkerRole | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerRole(vllm_config, kv_cache_config)
            self._scheduler.open()
        else:
            self._worker = WorkerRole(vllm_config, kv_cache_config)

    @property
    def requires_kv_delivery(self) -> bool:
        """A lost save is a later miss, nothing more."""
        return False

    # -- scheduler ------------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        self._as_scheduler.follow(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._as_scheduler.match(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self._as_scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self._as_scheduler.step(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._as_scheduler.reported(connector_output)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._as_scheduler.finished(request, (block_ids,)), None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._as_scheduler.finished(request, block_ids), None

    def reset_cache(self) -> bool:
        self._as_scheduler.clear()
        return True

    def take_events(self) -> Iterable[KVCacheEvent]:
        return self._as_scheduler.take_events()

    # -- worker ---------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._as_worker.register(kv_caches)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(kv_connector_metadata, KVFerryMetadata)
        self._as_worker.before_overwrite(kv_connector_metadata)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        self._as_worker.start_loads(self._metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        return

    def wait_for_save(self) -> None:
        self._as_worker.submit_saves(self._metadata())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        results = self.get_transfer_results(finished_req_ids)
        return results.finished_sending or None, results.finished_recving or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> TransferResults:
        return self._as_worker.transfer_results(self._metadata())

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._as_worker.take_invalid_blocks()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self._as_worker.worker_metadata()

    # -- both -----------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        role = self._scheduler or self._worker
        assert role is not None
        return role.take_stats()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return KVFerryStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVFerryPromMetrics:
        return KVFerryPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        for role in (self._scheduler, self._worker):
            if role is not None:
                role.close()

    def _metadata(self) -> KVFerryMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, KVFerryMetadata)
        return metadata

    @property
    def _as_scheduler(self) -> SchedulerRole:
        assert self._scheduler is not None, "this is a worker's connector"
        return self._scheduler

    @property
    def _as_worker(self) -> WorkerRole:
        assert self._worker is not None, "this is a scheduler's connector"
        return self._worker


__all__ = ["KVFerryConnector", "KVFerryMetadata", "KVFerryWorkerMetadata"]
