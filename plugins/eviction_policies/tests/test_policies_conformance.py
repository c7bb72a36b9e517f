"""Every policy keeps the laws of all policies."""

from __future__ import annotations

import pytest

from kvferry.api import UNLIMITED
from kvferry.testing.conformance import ManifestConformance, RuleConformance
from kvferry.testing.conformance.eviction import EvictionConformance
from kvferry_eviction_policies.options import IsolatedLRUOptions


class TestManifest(ManifestConformance):
    plugin = "eviction_policies"


class TestRules(RuleConformance):
    plugin = "eviction_policies"
    rule_prefix = "EVICT"


class TestLFU(EvictionConformance):
    plugin = "eviction_policies"
    policy = "lfu"


class TestFIFO(EvictionConformance):
    plugin = "eviction_policies"
    policy = "fifo"


class TestMRU(EvictionConformance):
    plugin = "eviction_policies"
    policy = "mru"
    least_share_of_lru = 0.3
    # It is for loops; conversations are the opposite of one.


class TestS3FIFO(EvictionConformance):
    plugin = "eviction_policies"
    policy = "s3fifo"


class TestIsolatedLRU(EvictionConformance):
    plugin = "eviction_policies"
    policy = "isolated_lru"

    @pytest.fixture
    def options(self) -> IsolatedLRUOptions:
        return IsolatedLRUOptions(default=UNLIMITED)
