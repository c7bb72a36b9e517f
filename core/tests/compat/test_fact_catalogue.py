"""The catalogue of facts and keys: complete, with a meaning for each."""

from __future__ import annotations

import enum
from collections.abc import Mapping

import attrs
import pytest
from attrs import field, frozen

from kvferry.api import (
    BackendCapabilities,
    BackendSpec,
    ByteSize,
    ChannelCapabilities,
    ChannelSpec,
    ConnectorSpec,
    Duration,
    EvictionSpec,
    FactKind,
    FactSource,
    HostEnvironment,
    LookupSpec,
    SourceSpec,
    StagingSpec,
)
from kvferry.compat import FactCatalogue, OwnedFactSpec, core_rules
from kvferry.compat.application import read_paths
from kvferry.compat.core_facts import CORE_FACTS
from kvferry.compat.findings import OwnedRule
from kvferry.compat.keys import core_keys, option_keys, option_sections
from kvferry.plugins import load_plugins

CATALOGUE = FactCatalogue(
    OwnedFactSpec(spec=spec, owner="core") for spec in (*CORE_FACTS, *(key.as_fact() for key in core_keys()))
)
# The folder of a persistent backend: whoever brings such a backend says what its path means.
OF_PLUGINS = {
    "tiers.*[capabilities.persistent][path].path",
    "one.tiers.*[capabilities.persistent][path].path",
    "other.tiers.*[capabilities.persistent][path].path",
}


@pytest.mark.parametrize("rule", core_rules(), ids=lambda rule: rule.id)
def test_every_fact_that_core_reads_is_in_the_catalogue(rule: object) -> None:
    paths = set(read_paths(OwnedRule(rule=rule, owner="core")))  # type: ignore[arg-type]
    assert [path for path in paths - OF_PLUGINS if CATALOGUE.find(path) is None] == []


def test_every_fact_that_core_probes_is_in_the_catalogue_with_its_type() -> None:
    types = {FactKind.SIZE: int, FactKind.COUNT: int, FactKind.FLAG: bool, FactKind.TEXT: str}
    plugins = load_plugins([], distributions=list)
    probed = plugins.facts(HostEnvironment()).facts
    assert probed
    for path, fact in probed.items():
        entry = CATALOGUE.find(path)
        assert entry is not None, path
        assert entry.spec.source is FactSource.HOST
        assert type(fact.value) is types[entry.spec.kind]


@pytest.mark.parametrize(
    ("section", "claims"), [("tiers.*", BackendCapabilities), ("channel", ChannelCapabilities)]
)
def test_every_claim_is_in_the_catalogue(section: str, claims: type[attrs.AttrsInstance]) -> None:
    names = {f"{section}.capabilities.{each.name}" for each in attrs.fields(claims)}
    assert names <= {spec.path for spec in CORE_FACTS}


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("tiers.cpu.capacity", "tiers.*.capacity"),
        ("tiers.*.capacity", "tiers.*.capacity"),
        ("one.tiers.*[capabilities.addressable].capacity", "tiers.*.capacity"),
        ("other.chunk_tokens", "chunk_tokens"),
        ("instances.*.engine.workers", "engine.workers"),
        ("instances.a.tiers.cpu.eviction.use", "tiers.*.eviction.use"),
        ("devices.npu.name", "devices.*.name"),
        ("tiers.cpu", None),
        ("host", None),
    ],
)
def test_a_fact_is_found_as_rules_read_it_and_as_reports_write_it(path: str, found: str | None) -> None:
    entry = CATALOGUE.find(path)
    assert (None if entry is None else entry.spec.path) == found


class Pace(enum.Enum):
    SLOW = "slow"
    FAST = "fast"


@frozen(kw_only=True)
class Wheel:
    size: ByteSize = field(metadata={"doc": "how large"})


@frozen(kw_only=True)
class Options:
    pace: Pace = Pace.SLOW
    wait: Duration | None = field(default=None, metadata={"doc": "how long"})
    limit: ByteSize = field(factory=lambda: ByteSize(3 << 20))
    wheels: tuple[Wheel, ...] = ()
    names: tuple[str, ...] = ("a", "b")
    note: str = ""
    spare: Mapping[str, Wheel] = field(factory=dict)
    shares: Mapping[str, float] = field(factory=lambda: {"a": 0.5})
    first: Wheel = Wheel(size=ByteSize(1))
    token: str = field(metadata={"secret": True})


def test_keys_are_read_off_any_options_class() -> None:
    rows = {key.path: (key.type, key.default, key.variable) for key in option_keys(Options, "tiers.*")}
    start = "KVFERRY__TIERS__<NAME>__"
    assert rows == {
        "tiers.*.pace": ("one of slow, fast", "slow", f"{start}PACE"),
        "tiers.*.wait": ("duration", "not set", f"{start}WAIT"),
        "tiers.*.limit": ("size", "3MiB", f"{start}LIMIT"),
        "tiers.*.wheels": ("list of sections", "[]", f"{start}WHEELS"),
        "tiers.*.wheels.*.size": ("size", None, ""),
        "tiers.*.names": ("list of texts", "[a, b]", f"{start}NAMES"),
        "tiers.*.note": ("text", '""', f"{start}NOTE"),
        "tiers.*.spare": ("mapping of texts to sections", "{}", f"{start}SPARE"),
        "tiers.*.spare.*.size": ("size", None, f"{start}SPARE__<NAME>__SIZE"),
        "tiers.*.shares": ("mapping of texts to numbers", "{a: 0.5}", f"{start}SHARES"),
        "tiers.*.first.size": ("size", None, f"{start}FIRST__SIZE"),
        "tiers.*.token": ("text", None, f"{start}TOKEN"),
    }
    assert [key.path for key in option_keys(Options, "x") if key.secret] == ["x.token"]


def test_plugins_keys_lie_where_the_schema_puts_them() -> None:
    assert option_sections() == {
        EvictionSpec: "tiers.*.eviction",
        BackendSpec: "tiers.*",
        ConnectorSpec: "connector",
        ChannelSpec: "channel",
        LookupSpec: "lookup",
        SourceSpec: "p2p",
        StagingSpec: "staging",
    }


def test_every_key_of_core_has_a_meaning() -> None:
    assert [key.path for key in core_keys() if not key.doc] == []
