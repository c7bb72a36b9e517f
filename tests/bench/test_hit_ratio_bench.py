"""A small run of the hit-ratio bench, and the optimum against an exhaustive search."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.control.lru import LRU
from kvferry.testing.replay import ReplayRequest, optimum, replay
from tests.bench.hit_ratio import OPTIMUM, POLICIES, run, table
from tests.bench.workloads import WORKLOADS


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return run(requests=200, sizes=(5, 20))


def rows(results: dict[str, Any]) -> list[tuple[str, dict[str, float]]]:
    return [
        (f"{name} {size}", ratios)
        for name, workload in results["workloads"].items()
        for size, ratios in workload["hit_ratio"].items()
    ]


def test_no_policy_beats_the_optimum(results: dict[str, Any]) -> None:
    for name, ratios in rows(results):
        assert set(ratios) == {*POLICIES, OPTIMUM}
        for policy in POLICIES:
            assert 0 < ratios[policy] <= ratios[OPTIMUM], (name, policy)
    for workload in results["workloads"].values():
        assert all(ratios[OPTIMUM] <= workload["unbounded"] for ratios in workload["hit_ratio"].values())


def test_what_resists_scans_beats_lru_under_a_scan(results: dict[str, Any]) -> None:
    for ratios in results["workloads"]["scan"]["hit_ratio"].values():
        for policy in ("s3fifo", "lfu", "isolated_lru"):
            assert ratios[policy] > ratios["lru"], policy


def test_the_same_seed_gives_the_same_table_and_another_one_another() -> None:
    one, same, other = (run(requests=60, sizes=(10,), seed=seed) for seed in (7, 7, 8))
    assert one == same
    assert rows(one) != rows(other)


def test_the_table_has_a_row_per_traffic_and_size(results: dict[str, Any]) -> None:
    made = table(results)
    assert made.row_count == len(WORKLOADS) * 2
    assert [column.header for column in made.columns] == ["traffic", "size", *POLICIES, OPTIMUM]


@pytest.mark.parametrize("name", WORKLOADS)
def test_no_chunk_is_in_two_places(name: str) -> None:
    """A digest stands for all chunks up to its own, as the replay demands."""
    before: dict[bytes, tuple[str, tuple[bytes, ...]]] = {}
    requests = WORKLOADS[name](3, 400)
    assert len(requests) == 400
    for request in requests:
        for depth, key in enumerate(request.keys):
            assert before.setdefault(key, (request.salt, request.keys[:depth])) == (
                request.salt,
                request.keys[:depth],
            )


paths = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=3), min_size=1, max_size=7)


@given(paths, st.integers(1, 4))
def test_the_optimum_is_what_an_exhaustive_search_finds(texts: list[list[int]], capacity: int) -> None:
    requests = [ReplayRequest(tuple(bytes(text[: end + 1]) for end in range(len(text)))) for text in texts]

    @functools.cache
    def best(number: int, kept: frozenset[bytes]) -> int:
        """Of every set that may be kept after a request, always whole beginnings, the best."""
        if number == len(requests):
            return 0
        keys = requests[number].keys
        there = sorted(kept | set(keys))
        found = sum(key in kept for key in keys)
        return found + max(
            best(number + 1, frozenset(chosen))
            for size in range(min(capacity, len(there)) + 1)
            for chosen in itertools.combinations(there, size)
            if all(len(key) == 1 or key[:-1] in chosen for key in chosen)
        )

    exact = optimum(requests, capacity)
    assert exact.found == best(0, frozenset())
    assert exact.asked == sum(len(text) for text in texts)
    padded = [ReplayRequest(tuple(key.ljust(32, b"\2") for key in request.keys)) for request in requests]
    assert optimum(padded, capacity) == exact
    assert replay(LRU(), padded, capacity).found <= exact.found
