"""The kit's laws, put to the CPU backend."""

from __future__ import annotations

from kvferry.testing.conformance import (
    AddressableBackendConformance,
    ManifestConformance,
    RuleConformance,
)


class TestCPUManifest(ManifestConformance):
    plugin = "backend_cpu"


class TestCPURules(RuleConformance):
    plugin = "backend_cpu"
    rule_prefix = "CPU"


class TestCPUBackend(AddressableBackendConformance):
    plugin = "backend_cpu"
    backend = "cpu"
