"""kvferry's statistics in vLLM's log and Prometheus endpoint.

What travels are totals by source (the scheduler's half, each rank), because reports get lost on the way:
``LLM`` of vLLM 0.23 drops those of steps without an output (``v1/engine/llm_engine.py``). Whoever shows
them computes what was added, so that the next report makes up for a lost one.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from attrs import asdict
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.v1.metrics.utils import create_metric_per_engine

from kvferry.runtime import SharingState

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvferry.runtime import LowerTierReport, SharingStatistics, TierStatistics

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
    "risen_tokens": "Of the hit tokens, those that came up from tiers below the first for it.",
    "waits": "Times that vLLM was told to ask again later, because chunks come up.",
    "waits_expired": "Requests whose time to wait was over before all had come; the rest was computed.",
    "wait_seconds": "Seconds that requests waited for chunks to come up.",
    "rises_shared": "Requests that found what they need on its way up already.",
    "rises_expired": "Prefixes that were given up at their deadline.",
    "borrowed_tokens": "Of the hit tokens, those that were read from other instances for it.",
    "borrowed_bytes": "Bytes read out of other instances' memory, all ranks.",
    "borrowed_seconds": "Seconds in which something was being read there, all ranks.",
    "borrow_quests": "Prefixes that were looked for at other instances.",
    "borrow_nobody": "Those that nobody had, or would lend.",
    "borrow_granted": "Grants that other instances gave.",
    "borrow_chunks": "Chunks of those grants.",
    "borrow_refused": "Questions that another instance answered with nothing.",
    "borrow_late": "Prefixes for which no answer came in time.",
    "borrow_untrue": "Grants of something else than was asked for.",
    "borrow_fetched": "Chunks read out of other instances' memory.",
    "borrow_failed": "Chunks that could not be read there.",
    "borrow_paused": "Times that an instance which failed was left alone for a while.",
    "lend_granted": "Grants to other instances.",
    "lend_chunks": "Chunks of those grants.",
    "lend_renewed": "Grants that were made to last longer.",
    "lend_done": "Grants that were given back.",
    "lend_expired": "Grants that ended by their time alone.",
    "lend_staged": "Chunks that were copied to where others read.",
    "lend_not_staged": "Chunks that were not, for lack of room there or of time.",
    "lend_nothing": "Questions of others for what is not here.",
    "lend_busy": "Questions of others that came while as much was lent as may be.",
    "lend_ended": "Questions of others that came after they were over.",
}
GAUGES: Mapping[str, str] = {
    "resident_chunks": "Chunks that can be found now.",
    "free_slots": "Slots that hold nothing now.",
    "capacity_slots": "Slots of the tier that are ready.",
    "pinned_slots": "Slots of chunks that are pinned.",
    "rises_under_way": "Prefixes that are on their way up now.",
    "sharing_open": "1 while something is shared with other instances, else 0.",
    "peers_agreed": "Other instances that may be asked now, of those that something was wanted of lately.",
    "peers_paused": "Those that failed and are left alone now.",
    "borrow_loans": "Grants of other instances that are held now.",
    "lend_leases": "Grants to other instances that are open now.",
    "lend_slots": "Slots of those grants.",
}
BORROW, LEND = "borrow_", "lend_"
LOWER = "lower_"
LOWER_COUNTERS: Mapping[str, str] = {
    "lower_stored": "Chunks copied down to the tier.",
    "lower_skipped": "Chunks not copied down: too much was on its way, or the tier was not open.",
    "lower_failed_stores": "Chunks whose copy down failed.",
    "lower_no_space": "Chunks that the store had no space for.",
    "lower_fetched": "Chunks brought up from the tier.",
    "lower_failed_fetches": "Chunks that could not be brought up.",
    "lower_corrupt": "Chunks that came back damaged; they are misses.",
    "lower_adopted": "Chunks found in the store when it was opened.",
    "lower_foreign": "Chunks found there that are not ours.",
    "lower_openings": "How often the tier was opened.",
    "lower_failures": "How often it was closed because it failed.",
    "lower_written_bytes": "Bytes stored in the tier, all ranks.",
    "lower_write_seconds": "Seconds in which something was being stored, all ranks.",
    "lower_read_bytes": "Bytes read from the tier, all ranks.",
    "lower_read_seconds": "Seconds in which something was being read, all ranks.",
}
LOWER_GAUGES: Mapping[str, str] = {
    "lower_open": "1 while the tier is in use, else 0.",
    "lower_chunks": "Chunks that can be found in the tier now.",
    "lower_capacity": "Chunks that the tier is thought to hold.",
    "lower_storing": "Chunks on their way down to it.",
    "lower_fetching": "Chunks on their way up from it.",
}
_COUNTERS = {**COUNTERS, **LOWER_COUNTERS}
_GAUGES = {**GAUGES, **LOWER_GAUGES}
_OF_TIER = " tier "
"""Stands in the name of a source between who tells and the tier that it is about."""

Number = int | float
BEFORE = "before"
NOW = "now"


def added(now: Mapping[str, Number], before: Mapping[str, Number]) -> dict[str, Number]:
    """What was added to the counters of one source. One that is smaller than before began anew."""
    counters = {name: value for name, value in now.items() if name in _COUNTERS}
    if any(value < before.get(name, 0) for name, value in counters.items()):
        return counters
    return {name: value - before.get(name, 0) for name, value in counters.items()}


def scheduler_lower(tier: LowerTierReport) -> dict[str, Number]:
    """What the scheduler's half knows of a tier below the first."""
    known = {LOWER + name: value for name, value in asdict(tier).items()}
    numbers = {name: known[name] for name in (*LOWER_COUNTERS, *LOWER_GAUGES) if name in known}
    return {**numbers, LOWER + "open": int(tier.health == "open")}


def worker_lower(tier: TierStatistics) -> dict[str, Number]:
    """What one rank knows of it."""
    return {LOWER + name: value for name, value in asdict(tier).items()}


def scheduler_sharing(sharing: SharingStatistics) -> dict[str, Number]:
    """What the scheduler's half knows of other instances."""
    standings = [peer.standing for peer in sharing.peers]
    known = {
        "borrowed_tokens": sharing.borrowed_tokens,
        "borrow_loans": sharing.loans,
        **{BORROW + name: value for name, value in sharing.borrowed.items()},
        "lend_leases": sharing.leases,
        "lend_slots": sharing.slots,
        **{LEND + name: value for name, value in sharing.lent.items()},
        "sharing_open": int(sharing.state is SharingState.OPEN),
        "peers_agreed": standings.count("agreed"),
        "peers_paused": standings.count("paused"),
    }
    return {name: value for name, value in known.items() if name in COUNTERS or name in GAUGES}


def worker_sharing(read: TierStatistics) -> dict[str, Number]:
    """What one rank knows of them."""
    return {"borrowed_bytes": read.read_bytes, "borrowed_seconds": read.read_seconds}


class Totals:
    """Turns the numbers of one source into reports. ``source`` is unique within an engine."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._before: dict[str, Number] = {}
        self._tiers: dict[str, Totals] = {}

    def report(
        self, now: dict[str, Number], lower: Mapping[str, dict[str, Number]] | None = None
    ) -> KVFerryStats:
        """Totals since start and gauges, with those of the last report; those of tiers below the first by
        the tier's name."""
        before, self._before = self._before, now
        data = {self._source: {BEFORE: before, NOW: now}}
        for tier, numbers in (lower or {}).items():
            if tier not in self._tiers:
                self._tiers[tier] = Totals(self._source + _OF_TIER + tier)
            data.update(self._tiers[tier].report(numbers).data)
        return KVFerryStats(data=data)


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
        """What vLLM logs: what was added since the last line, over all sources, and gauges. Numbers of tiers
        below the first begin with the tier's name."""
        found: dict[str, int | float] = defaultdict(int)
        for source, numbers in self.data.items():
            tier = tier_of(source)
            for name, more in added(numbers[NOW], numbers[BEFORE]).items():
                found[_logged(tier, name)] += more
            found.update(
                {_logged(tier, name): value for name, value in numbers[NOW].items() if name in _GAUGES}
            )
        return {name: _short(value) for name, value in found.items() if value}

    def is_empty(self) -> bool:
        """Whether nothing changed: vLLM writes no line then."""
        return all(numbers[NOW] == numbers[BEFORE] for numbers in self.data.values())


class KVFerryPromMetrics(KVConnectorPromMetrics):
    """``kvferry:<name>_total`` counters and ``kvferry:<name>`` gauges, one series per engine; those of tiers
    below the first also have the label ``tier``."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine)
        self._counters = {
            name: self._per_engine(self._counter_cls, name, text) for name, text in COUNTERS.items()
        }
        self._gauges = {name: self._per_engine(self._gauge_cls, name, text) for name, text in GAUGES.items()}
        self._lower = {
            name: self._metric(kind, name, text, [*labelnames, "tier"])
            for kind, names in ((self._counter_cls, LOWER_COUNTERS), (self._gauge_cls, LOWER_GAUGES))
            for name, text in names.items()
        }
        self._series: dict[tuple[int, str, str], Any] = {}
        """Of tiers below the first, by engine, tier and name."""
        self._seen: dict[tuple[int, str], dict[str, Number]] = {}
        """By engine and source."""

    def _metric(self, kind: Any, name: str, text: str, labels: Any) -> Any:
        return kind(name=f"kvferry:{name}", documentation=text, labelnames=labels)

    def _per_engine(self, kind: Any, name: str, text: str) -> Any:
        metric = self._metric(kind, name, text, self._labelnames)
        return create_metric_per_engine(metric, self.per_engine_labelvalues)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for source, numbers in transfer_stats_data.items():
            now, tier = numbers[NOW], tier_of(source)
            for name, more in added(now, self._seen.get((engine_idx, source), {})).items():
                # One of a tier is made even if nothing was added: what is 0 is to be seen as 0.
                series = self._of_tier(engine_idx, tier, name) if tier else self._counters[name][engine_idx]
                if more:
                    series.inc(more)
            for name in _GAUGES.keys() & now.keys():
                series = self._of_tier(engine_idx, tier, name) if tier else self._gauges[name][engine_idx]
                series.set(now[name])
            self._seen[engine_idx, source] = now

    def _of_tier(self, engine: int, tier: str, name: str) -> Any:
        series = self._series.get((engine, tier, name))
        if series is None:
            series = self._lower[name].labels(*self.per_engine_labelvalues[engine], tier)
            self._series[engine, tier, name] = series
        return series


def tier_of(source: str) -> str:
    """The tier below the first that a source is about; empty if about none."""
    return source.partition(_OF_TIER)[2]


def _logged(tier: str, name: str) -> str:
    return f"{tier}.{name.removeprefix(LOWER)}" if tier else name


def _short(value: float) -> int | float:
    return value if isinstance(value, int) else round(value, 3)
