"""kvferry's statistics in vLLM's log and Prometheus endpoint.

What travels are totals by source (the scheduler's half, each rank), because reports get lost on the way:
``LLM`` of vLLM 0.23 drops those of steps without an output (``v1/engine/llm_engine.py``). Whoever shows
them computes what was added, so that the next report makes up for a lost one.
"""

from __future__ import annotations

from collections import defaultdict
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


BEFORE = "before"
NOW = "now"


def added(now: Mapping[str, int], before: Mapping[str, int]) -> dict[str, int]:
    """What was added to the counters of one source. One that is smaller than before began anew."""
    counters = {name: value for name, value in now.items() if name in COUNTERS}
    if any(value < before.get(name, 0) for name, value in counters.items()):
        return counters
    return {name: value - before.get(name, 0) for name, value in counters.items()}


class Totals:
    """Turns the numbers of one source into reports. ``source`` is unique within an engine."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._before: dict[str, int] = {}

    def report(self, now: dict[str, int]) -> KVFerryStats:
        """Totals since start and gauges, with those of the last report."""
        before, self._before = self._before, now
        return KVFerryStats(data={self._source: {BEFORE: before, NOW: now}})


class KVFerryStats(KVConnectorStats):
    """By source, the numbers before the first report that is in here and those of the latest."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for source, numbers in other.data.items():
            before = self.data.get(source, numbers)[BEFORE]
            self.data[source] = {BEFORE: before, NOW: numbers[NOW]}
        return self

    def reduce(self) -> dict[str, int | float]:
        """What vLLM logs: what was added since the last line, over all sources, and gauges."""
        found: dict[str, int | float] = defaultdict(int)
        for numbers in self.data.values():
            for name, more in added(numbers[NOW], numbers[BEFORE]).items():
                found[name] += more
            found.update({name: value for name, value in numbers[NOW].items() if name in GAUGES})
        return {name: value for name, value in found.items() if value}

    def is_empty(self) -> bool:
        """Whether nothing changed: vLLM writes no line then."""
        return all(numbers[NOW] == numbers[BEFORE] for numbers in self.data.values())


class KVFerryPromMetrics(KVConnectorPromMetrics):
    """``kvferry:<name>_total`` counters and ``kvferry:<name>`` gauges, one series per engine."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine)
        self._counters = {
            name: self._per_engine(self._counter_cls, name, text) for name, text in COUNTERS.items()
        }
        self._gauges = {name: self._per_engine(self._gauge_cls, name, text) for name, text in GAUGES.items()}
        self._seen: dict[tuple[int, str], dict[str, int]] = {}
        """By engine and source."""

    def _per_engine(self, kind: Any, name: str, text: str) -> Any:
        metric = kind(name=f"kvferry:{name}", documentation=text, labelnames=self._labelnames)
        return create_metric_per_engine(metric, self.per_engine_labelvalues)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for source, numbers in transfer_stats_data.items():
            now = numbers[NOW]
            for name, more in added(now, self._seen.get((engine_idx, source), {})).items():
                if more:
                    self._counters[name][engine_idx].inc(more)
            for name in GAUGES.keys() & now.keys():
                self._gauges[name][engine_idx].set(now[name])
            self._seen[engine_idx, source] = now
