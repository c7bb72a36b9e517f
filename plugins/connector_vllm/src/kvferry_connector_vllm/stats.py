"""kvferry's statistics in vLLM's log and Prometheus endpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.v1.metrics.utils import create_metric_per_engine

if TYPE_CHECKING:
    from collections.abc import Mapping

COUNTERS: Mapping[str, str] = {
    "queries": "Requests that asked kvferry for a prefix.",
    "query_tokens": "Tokens that those requests could have found.",
    "hit_tokens": "Tokens that the engine took from kvferry.",
    "loaded_tokens": "Tokens whose load ended well on every rank.",
    "saved_tokens": "Tokens whose save ended well on every rank.",
    "failed_loads": "Loads of which some chunk failed on some rank; its tokens were recomputed.",
    "failed_saves": "Chunks whose save failed on some rank.",
    "refused_saves": "Chunks that found no room.",
    "evictions": "Chunks that made room for others.",
    "over_quota": "Chunks that their owner's quota had no room for.",
    "ended": "Chunks whose time to live ended.",
    "pins_refused": "Chunks that were not pinned because of a limit.",
    "saved_bytes": "Bytes copied out of the engine's KV cache, all ranks.",
    "loaded_bytes": "Bytes copied into the engine's KV cache, all ranks.",
    "verified_blocks": "Restored blocks whose digest was compared, all ranks.",
    "mismatched_blocks": "Restored blocks whose digest differed, all ranks.",
}
GAUGES: Mapping[str, str] = {
    "resident_chunks": "Chunks that can be found now.",
    "free_slots": "Slots that hold nothing now.",
    "capacity_slots": "Slots of the tier that are ready.",
    "pinned_slots": "Slots of chunks that are pinned.",
}


class KVFerryStats(KVConnectorStats):
    """Counters since the last report and the latest gauges."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, value in other.data.items():
            self.data[name] = value if name in GAUGES else self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        return {name: value for name, value in self.data.items() if value}

    def is_empty(self) -> bool:
        return not self.data


class KVFerryPromMetrics(KVConnectorPromMetrics):
    """``kvferry:<name>_total`` counters and ``kvferry:<name>`` gauges, one series per engine."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine)
        self._counters = {
            name: self._per_engine(self._counter_cls, name, text) for name, text in COUNTERS.items()
        }
        self._gauges = {name: self._per_engine(self._gauge_cls, name, text) for name, text in GAUGES.items()}

    def _per_engine(self, kind: Any, name: str, text: str) -> Any:
        metric = kind(name=f"kvferry:{name}", documentation=text, labelnames=self._labelnames)
        return create_metric_per_engine(metric, self.per_engine_labelvalues)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, value in transfer_stats_data.items():
            if name in self._counters:
                self._counters[name][engine_idx].inc(value)
            elif name in self._gauges:
                self._gauges[name][engine_idx].set(value)
