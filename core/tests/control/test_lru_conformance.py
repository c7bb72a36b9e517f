"""The built-in policy keeps the laws of all policies."""

from __future__ import annotations

from kvferry.testing.conformance.eviction import EvictionConformance


class TestLRU(EvictionConformance):
    plugin = "core"
    policy = "lru"
    least_share_of_lru = 1.0
