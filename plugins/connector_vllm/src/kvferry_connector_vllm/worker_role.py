"""A worker's half of the connector."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from attrs import asdict

from kvferry.runtime import KVFerryError, WorkerRuntime
from kvferry_connector_vllm.engine import one_plain_group
from kvferry_connector_vllm.pages import engine_groups
from kvferry_connector_vllm.scheduler_role import KVFerryMetadata, KVFerryWorkerMetadata
from kvferry_connector_vllm.startup import Startup
from kvferry_connector_vllm.stats import KVFerryStats, Totals, worker_lower, worker_sharing
from kvferry_connector_vllm.versions import TransferResults

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(__name__)

_COUNTED = ("saved_bytes", "loaded_bytes", "verified_blocks", "mismatched_blocks")


class WorkerRole:
    """Turns vLLM's calls into calls of :class:`~kvferry.runtime.WorkerRuntime`, on the worker's thread.

    The configuration is checked in the constructor, so that an engine with an error stops before it
    allocates anything.
    """

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        self._startup = Startup(vllm_config, kv_cache_config)
        self._startup.check()
        self._config = kv_cache_config
        self._runtime: WorkerRuntime | None = None
        self._invalid: set[int] = set()
        # One group without a window: the engine keeps what lies before the first bad block. Else it can
        # only be told per request, and recomputes all of it: blocks of several groups would end the
        # engine, and what a window needs before the first bad block is not there.
        self._by_request = not one_plain_group(kv_cache_config)
        self._totals = Totals(f"rank {self._startup.rank}")

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if self._startup.unsupported is not None:
            return
        try:
            groups = engine_groups(kv_caches, self._config)
        except KVFerryError as error:
            # The scheduler's half waits for this rank for ever, and so nothing is cached.
            logger.warning("kvferry: nothing is cached and nothing changes: %s", error)
            return
        self._runtime = self._startup.open_worker(groups)

    def close(self) -> None:
        if self._runtime is not None:
            self._runtime.close()

    def before_overwrite(self, metadata: KVFerryMetadata) -> None:
        if self._runtime is not None:
            self._runtime.before_overwrite(metadata.plan)

    def start_loads(self, metadata: KVFerryMetadata) -> None:
        if self._runtime is not None:
            self._runtime.start_loads(metadata.plan)

    def submit_saves(self, metadata: KVFerryMetadata) -> None:
        """After the forward pass. A step without one has nothing to wait for, and vLLM 0.23 does not ask
        there: its saves are submitted when vLLM asks what has ended."""
        if not metadata.plan.idle:
            self._submit_saves(metadata)

    def _submit_saves(self, metadata: KVFerryMetadata) -> None:
        if self._runtime is not None:
            seen = metadata.failures_seen.get(self._startup.rank, 0)
            self._runtime.submit_saves(metadata.plan, seen)

    def transfer_results(self, metadata: KVFerryMetadata) -> TransferResults:
        if self._runtime is None:
            return TransferResults()
        if metadata.plan.idle:
            self._submit_saves(metadata)
        report = self._runtime.report(metadata.plan)
        self._invalid |= set() if self._by_request else report.invalid_blocks
        return TransferResults(
            finished_sending=set(report.finished_sending),
            finished_recving=set(report.finished_receiving),
            failed_recving=set(report.failed_receiving) if self._by_request else set(),
        )

    def take_invalid_blocks(self) -> set[int]:
        invalid, self._invalid = self._invalid, set()
        return invalid

    def worker_metadata(self) -> KVFerryWorkerMetadata | None:
        if self._runtime is None or self._runtime.failures == 0:
            return None
        return KVFerryWorkerMetadata({self._startup.rank: self._runtime.failures})

    def take_stats(self) -> KVFerryStats | None:
        """Totals since start, unchanged ones too: vLLM 0.23 asks the scheduler's half only where a worker
        has said something."""
        if self._runtime is None:
            return None
        totals = asdict(self._runtime.statistics())
        lower = {name: worker_lower(tier) for name, tier in self._runtime.tier_statistics().items()}
        peers = self._runtime.peer_statistics()
        shared = {} if peers is None else worker_sharing(peers)
        return self._totals.report({**{name: totals[name] for name in _COUNTED}, **shared}, lower)
