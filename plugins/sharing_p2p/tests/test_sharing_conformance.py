"""The kit's laws for plugins."""

from __future__ import annotations

from kvferry.testing.conformance import ManifestConformance, RuleConformance


class TestSharingManifest(ManifestConformance):
    plugin = "sharing_p2p"


class TestSharingRules(RuleConformance):
    plugin = "sharing_p2p"
    rule_prefix = "P2P"
