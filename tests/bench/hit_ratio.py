"""Hit ratios of all eviction policies over three kinds of traffic, against the offline optimum.

Run ``python -m tests.bench.hit_ratio``; ``--json FILE`` writes the numbers as well. Nothing is timed:
the same seed gives the same table on every machine.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kvferry.api import UNLIMITED, ByteLimit
from kvferry.plugins import LoadedPlugins, PluginRequest, load_plugins
from kvferry.testing.replay import ReplayRequest, optimum, replay
from kvferry_eviction_policies.options import IsolatedLRUOptions
from tests.bench.workloads import BATCH, TENANTS, WORKLOADS

POLICIES = ("lru", "fifo", "mru", "lfu", "s3fifo", "isolated_lru")
REQUESTS = 2000
SEED = 1
SIZES = (2, 5, 10, 25)
"""Slots of the tier, in percent of the distinct chunks of the workload."""
OPTIMUM = "optimum"


def run(
    requests: int = REQUESTS,
    sizes: Sequence[int] = SIZES,
    policies: Sequence[str] = POLICIES,
    seed: int = SEED,
) -> dict[str, Any]:
    """By workload: its counts, and by size the share of all chunks that was found, by policy."""
    plugins = load_plugins([PluginRequest.parse("eviction_policies")])
    results: dict[str, Any] = {"seed": seed, "requests": requests, "workloads": {}}
    for name, make in WORKLOADS.items():
        trace = make(seed, requests)
        distinct = len({key for request in trace for key in request.keys})
        asked = sum(len(request.keys) for request in trace)
        results["workloads"][name] = {
            "distinct_chunks": distinct,
            "chunks": asked,
            "unbounded": 1 - distinct / asked,
            "hit_ratio": {
                f"{size}%": _ratios(plugins, policies, trace, max(1, distinct * size // 100))
                for size in sizes
            },
        }
    return results


def _ratios(
    plugins: LoadedPlugins, policies: Sequence[str], trace: Sequence[ReplayRequest], slots: int
) -> dict[str, float]:
    ratios = {
        name: replay(
            build(plugins, name, slots), trace, slots, quotas=plugins.eviction(name).quotas
        ).hit_ratio
        for name in policies
    }
    return {**ratios, OPTIMUM: optimum(trace, slots).hit_ratio}


def build(plugins: LoadedPlugins, name: str, slots: int) -> Any:
    """A policy as core builds it. With quotas the tenants have equal parts, the batch job a tenth."""
    factory = plugins.factory("eviction", name)
    if not plugins.eviction(name).quotas:
        return factory()
    quotas = {tenant: ByteLimit(slots // len(TENANTS)) for tenant in TENANTS}
    return factory(
        IsolatedLRUOptions(default=UNLIMITED, quotas={**quotas, BATCH: ByteLimit(max(1, slots // 10))})
    )


def table(results: Mapping[str, Any]) -> Table:
    """One row per workload and size."""
    made = Table(title="chunks found, in percent", title_justify="left")
    made.add_column("traffic")
    made.add_column("size", justify="right")
    rows = [
        (name, size, ratios)
        for name, workload in results["workloads"].items()
        for size, ratios in workload["hit_ratio"].items()
    ]
    for policy in rows[0][2]:
        made.add_column(policy, justify="right")
    for name, size, ratios in rows:
        made.add_row(name, size, *(f"{100 * ratio:.1f}" for ratio in ratios.values()))
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.hit_ratio", description=__doc__)
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--json", type=Path)
    parsed = parser.parse_args(arguments)
    results = run(requests=parsed.requests, seed=parsed.seed)
    Console().print(table(results))
    if parsed.json is not None:
        parsed.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
