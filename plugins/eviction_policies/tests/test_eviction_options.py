"""What a configuration may say, and what it is told when it says something else."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path

import pytest

from kvferry.api import ENTRY_POINT_GROUP, UNLIMITED, HostEnvironment
from kvferry.config import ConfigSources
from kvferry.runtime.examination import Examination
from kvferry.runtime.startup import examine
from kvferry.testing.light_imports import measure_import
from kvferry_eviction_policies import plugin
from kvferry_eviction_policies.options import IsolatedLRUOptions
from plugins.eviction_policies.tests.subjects import loaded

MIB = 1 << 20


@pytest.fixture
def examined(tmp_path: Path):  # type: ignore[no-untyped-def]
    """Reads a tier whose eviction section is the given text."""

    def examined(eviction: str) -> Examination:
        file = tmp_path / "kvferry.yaml"
        file.write_text(
            "plugins: [backend_cpu, eviction_policies]\n"
            f"tiers:\n  cpu:\n    use: cpu\n    capacity: 64MiB\n    eviction: {eviction}\n"
        )
        return examine(
            ConfigSources(file=file, environment={}, overrides={}), HostEnvironment(root=str(tmp_path))
        )

    return examined


def told(examination: Examination) -> str:
    return "\n".join(str(fault) for fault in examination.config_faults)


def violated(examination: Examination) -> set[str]:
    assert examination.report is not None, told(examination)
    return {
        finding.rule.id
        for finding in examination.report.findings
        if finding.outcome.value == "violated" and finding.rule.id.startswith("EVICT")
    }


def test_the_installed_entry_point_leads_to_the_manifest() -> None:
    (point,) = (p for p in entry_points(group=ENTRY_POINT_GROUP) if p.name == plugin.MANIFEST.name)
    assert point.load() is plugin


def test_the_entry_module_is_light_and_leaves_the_policies_alone() -> None:
    cost = measure_import("kvferry_eviction_policies.plugin", runs=3)
    assert cost.light, cost
    assert not {name for name in cost.modules if name.endswith((".ordered", ".s3fifo", ".isolated_lru"))}


def test_only_isolated_lru_claims_quotas() -> None:
    specs = {owned.spec.name: owned.spec for owned in loaded().specs("eviction")}
    assert {"lru", "lfu", "fifo", "mru", "s3fifo", "isolated_lru"} == set(specs)
    assert [name for name in specs if loaded().eviction(name).quotas] == ["isolated_lru"]


@pytest.mark.parametrize("name", ["lfu", "fifo", "mru", "s3fifo"])
def test_a_policy_without_options_needs_its_name_alone(examined, name: str) -> None:  # type: ignore[no-untyped-def]
    found = examined(name)
    assert found.config_faults == ()
    assert found.config.tiers["cpu"].eviction.options is None
    assert violated(found) == set()


def test_quotas_and_default_are_read(examined) -> None:  # type: ignore[no-untyped-def]
    found = examined("{use: isolated_lru, default: 0B, quotas: {a.b: 16MiB, '': unlimited}}")
    assert found.config.tiers["cpu"].eviction.options == IsolatedLRUOptions(
        default=0,  # type: ignore[arg-type]
        quotas={"a.b": 16 * MIB, "": UNLIMITED},  # type: ignore[dict-item]
    )
    facts = found.config.facts()
    assert facts["tiers.cpu.eviction.quotas"].value == {"a.b": 16 * MIB, "": UNLIMITED}
    assert violated(found) == set()


@pytest.mark.parametrize(
    ("eviction", "words"),
    [
        ("isolated_lru", ["'default' is missing", "unlimited, or 0B to keep nothing"]),
        ("{use: isolated_lru, quotas: {a: 1MiB}}", ["'default' is missing"]),
        ("{use: isolated_lru, default: 0}", ["default: expected a size with a unit, or unlimited", "0B"]),
        ("{use: isolated_lru, default: null}", ["default: expected a size with a unit, or unlimited"]),
        ("{use: isolated_lru, default: Unlimited}", ["'Unlimited' is not a size", "the word unlimited"]),
        ("{use: isolated_lru, default: 0B, quotas: {a: 5, b: -1MiB}}", ["quotas.a", "quotas.b", "negative"]),
        ("{use: isolated_lru, default: 0B, quotas: [a]}", ["quotas: expected a mapping"]),
        ("{use: isolated_lru, default: 0B, quota: {a: 1MiB}}", ["did you mean 'quotas'?"]),
        ("{use: lfu, quotas: {a: 1MiB}}", ["quotas", "unknown key"]),
    ],
)
def test_what_is_wrong_is_told_at_its_place(examined, eviction: str, words: list[str]) -> None:  # type: ignore[no-untyped-def]
    found = examined(eviction)
    text = told(found)
    assert "kvferry.yaml:6:" in text
    for word in words:
        assert word in text


@pytest.mark.parametrize(
    ("eviction", "rules"),
    [
        ("{use: isolated_lru, default: unlimited, quotas: {a: 32MiB, b: 32MiB, c: unlimited}}", set()),
        ("{use: isolated_lru, default: unlimited, quotas: {a: 32MiB, b: 33MiB}}", {"EVICT001"}),
        ("{use: isolated_lru, default: unlimited, quotas: {a@b: 32MiB}}", {"EVICT003"}),
        ("{use: isolated_lru, default: unlimited, quotas: {' a': 32MiB}}", {"EVICT005"}),
        ("{use: isolated_lru, default: unlimited, quotas: {'${TENANT}': 32MiB}}", {"EVICT005"}),
        ("{use: isolated_lru, default: 0B}", {"EVICT004"}),
        ("{use: isolated_lru, default: 0B, quotas: {a: 0B}}", {"EVICT004"}),
    ],
)
def test_rules_judge_the_quotas(examined, eviction: str, rules: set[str]) -> None:  # type: ignore[no-untyped-def]
    assert violated(examined(eviction)) == rules
