"""Sections whose keys belong to plugins."""

from __future__ import annotations

import copy
import enum
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from attrs import field, frozen

from kvferry.api import (
    BackendSpec,
    ChannelSpec,
    ConnectorSpec,
    ErrorKind,
    EvictionSpec,
    KVFerryError,
    KVFerryErrors,
    LookupSpec,
    SourceSpec,
    StagingSpec,
)
from kvferry.config import (
    ByteSize,
    Config,
    ConfigSources,
    Duration,
    Resolver,
    config_data,
    config_text,
    read_core,
)


@frozen(kw_only=True)
class Retrying:
    times: int = 3
    pause: Duration = field(default=Duration(0.5))


class Level(enum.IntEnum):
    ONE = 1
    TWO = 2


@frozen(kw_only=True)
class Login:
    user: str


@frozen(kw_only=True)
class BackendOptions:
    pinned: bool = False
    slab: ByteSize | None = None
    window: tuple[int, float] = (1, 2.0)
    retrying: Retrying = field(factory=lambda: Retrying(times=9))
    token: str | None = field(default=None, metadata={"secret": True})
    tokens: Mapping[str, str] = field(factory=dict, metadata={"secret": True})
    pin: int = field(default=1, metadata={"secret": True})
    lifetime: Duration | None = field(default=None, metadata={"secret": True})
    login: Login | None = field(default=None, metadata={"secret": True})
    level: Level = Level.ONE


@frozen(kw_only=True)
class ConnectorOptions:
    load: str = "async"
    threads: int = 2


@frozen(kw_only=True)
class ChannelOptions:
    lanes: int = 4


@frozen(kw_only=True)
class DirectoryOptions:
    url: str


@frozen(kw_only=True)
class PeerOptions:
    listen: str = "tcp://127.0.0.1:0"


@frozen(kw_only=True)
class StagingOptions:
    copiers: int = 2


@frozen(kw_only=True)
class PolicyOptions:
    seed: int = 7


def resolve(selection: Any) -> type[Any] | None:
    if selection.use is None and selection.spec is not ConnectorSpec:
        return None
    return {
        BackendSpec: BackendOptions,
        ConnectorSpec: ConnectorOptions,
        EvictionSpec: PolicyOptions,
        ChannelSpec: ChannelOptions,
        LookupSpec: DirectoryOptions,
        SourceSpec: PeerOptions,
        StagingSpec: StagingOptions,
    }[selection.spec]


def load(overrides: Mapping[str, Any], resolver: Resolver = resolve) -> Config:
    sources = ConfigSources(
        file=None, environment={}, overrides={f"kvferry.{key}": v for key, v in overrides.items()}
    )
    return read_core(sources).structure(resolver)


def faults(overrides: Mapping[str, Any], resolver: Resolver = resolve) -> list[KVFerryError]:
    with pytest.raises(KVFerryErrors) as caught:
        load(overrides, resolver)
    return list(caught.value.errors)


TIER = {"use": "cpu", "capacity": "1GiB"}


def test_every_section_gets_the_options_of_its_own_plugin() -> None:
    config = load(
        {
            "tiers.a": {**TIER, "pinned": True, "slab": "2MiB", "window": [3, 4]},
            "tiers.b": {**TIER, "eviction": {"use": "s3", "seed": 1}, "retrying": {"pause": "1s"}},
            "connector": {"threads": 5},
            "channel": {"use": "wire", "lanes": 1},
            "lookup": {"use": "desk", "url": "tcp://a:1"},
            "p2p": {"use": "peers", "listen": "tcp://b:2"},
            "staging": {"use": "desk", "capacity": "2GiB", "copiers": 4},
        }
    )

    first, second = config.tiers.values()
    assert first.options == BackendOptions(pinned=True, slab=ByteSize(2**21), window=(3, 4.0))
    assert second.options == BackendOptions(retrying=Retrying(pause=Duration(1.0)))
    assert (first.eviction.use, first.eviction.options) == ("lru", PolicyOptions())
    assert (second.eviction.use, second.eviction.options) == ("s3", PolicyOptions(seed=1))
    assert config.connector.options == ConnectorOptions(threads=5)
    assert (config.channel.use, config.channel.options) == ("wire", ChannelOptions(lanes=1))
    assert (config.lookup.use, config.lookup.options) == ("desk", DirectoryOptions(url="tcp://a:1"))
    assert (config.p2p.use, config.p2p.options) == ("peers", PeerOptions(listen="tcp://b:2"))
    assert (config.staging.use, config.staging.capacity) == ("desk", 2 << 30)
    assert config.staging.options == StagingOptions(copiers=4)


def test_a_connector_that_is_not_mentioned_has_its_defaults() -> None:
    config = load({})

    assert config.connector.use is None
    assert config.connector.options == ConnectorOptions()
    assert config.facts()["connector.load"].value == "async"
    assert config.facts()["connector.load"].origin == "default"


def test_without_a_channel_a_directory_and_a_staging_there_are_none_and_rules_know_it() -> None:
    config = load({})

    assert (config.channel.use, config.channel.options) == (None, None)
    assert (config.lookup.use, config.lookup.options) == (None, None)
    assert (config.staging.use, config.staging.options) == (None, None)
    sections = ("channel", "look", "staging")
    below = {path: fact.value for path, fact in config.facts().items() if path.startswith(sections)}
    assert below == {
        "channel.use": None,
        "lookup.use": None,
        "staging.use": None,
        "staging.capacity": 1 << 30,
    }


@pytest.mark.parametrize(
    ("section", "own", "known"),
    [
        ("channel", {"lanes": 1}, "use, lanes"),
        ("lookup", {"url": "a"}, "use, url"),
        ("staging", {"copiers": 1}, "use, capacity, copiers"),
    ],
)
def test_what_is_chosen_takes_its_own_keys_and_no_others(
    section: str, own: Mapping[str, Any], known: str
) -> None:
    (error,) = faults({section: {"use": "x", **own, "zeal": 1}})

    assert error.what == f"{section}.zeal: unknown key"
    assert error.remedy == f"known keys: {known}"


def test_a_staging_s_capacity_is_core_s_and_wants_a_unit() -> None:
    (error,) = faults({"staging": {"use": "x", "capacity": 5}})

    assert error.what.startswith("staging.capacity: ")
    assert "unit" in str(error)


def test_a_mode_that_is_none_is_told_with_those_that_are() -> None:
    (error,) = faults({"p2p": {"use": "x", "land_on": "npu"}})

    assert error.what == "p2p.land_on: expected one of 'host', 'device', not the text 'npu'"


def test_selections_name_kind_section_and_origin(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("tiers:\n  a: {use: cpu, capacity: 1GiB, eviction: s3}\nconnector: {use: v}\n")

    raw = read_core(ConfigSources(file=file, environment={}, overrides={}))

    assert sorted((s.path, s.spec.__name__, s.use, s.origin) for s in raw.selections) == [
        (("channel",), "ChannelSpec", None, "default"),
        (("connector",), "ConnectorSpec", "v", f"{file}:3:18"),
        (("lookup",), "LookupSpec", None, "default"),
        (("p2p",), "SourceSpec", None, "default"),
        (("staging",), "StagingSpec", None, "default"),
        (("tiers", "a"), "BackendSpec", "cpu", f"{file}:2:12"),
        (("tiers", "a", "eviction"), "EvictionSpec", "s3", f"{file}:2:43"),
    ]


def test_each_selection_is_resolved_once() -> None:
    asked: list[tuple[str, ...]] = []

    def counting(selection: Any) -> type[Any] | None:
        asked.append(selection.path)
        return resolve(selection)

    load({"tiers.a": TIER, "tiers.b": TIER}, counting)

    assert len(asked) == len(set(asked)) == 9


def test_a_place_of_the_resolvers_own_is_kept_and_several_errors_stay_several() -> None:
    def failing(selection: Any) -> type[Any] | None:
        if selection.spec is not BackendSpec:
            return None
        raise KVFerryErrors(
            "two",
            [
                KVFerryError("no such backend", kind=ErrorKind.PLUGIN, remedy="install it"),
                KVFerryError("broken", kind=ErrorKind.PLUGIN, where="plugin x"),
            ],
            kind=ErrorKind.PLUGIN,
        )

    # The backend's own keys cannot be judged without it, so nothing is said about them.
    found = faults({"tiers.a": {**TIER, "whatever": 1}}, failing)

    assert [(error.where, error.what, error.remedy) for error in found] == [
        ("kv_connector_extra_config", "tiers.a.use: no such backend", "install it"),
        ("plugin x", "broken", ""),
    ]


def test_faults_of_the_caller_join_the_report() -> None:
    mine = KVFerryError("plugin x cannot be imported", kind=ErrorKind.PLUGIN, where="plugin x")
    raw = read_core(ConfigSources(file=None, environment={}, overrides={"kvferry.chunk_tokens": 0}))

    with pytest.raises(KVFerryErrors) as caught:
        raw.structure(resolve, [mine])

    assert [error.what for error in caught.value.errors] == [
        "chunk_tokens: must be above zero",
        "plugin x cannot be imported",
    ]


def test_a_key_that_is_cores_own_is_refused_in_options() -> None:
    @frozen
    class Greedy:
        capacity: ByteSize = field(default=ByteSize(0))

    (error,) = faults({"tiers.a": TIER}, lambda s: Greedy if s.spec is BackendSpec else None)

    assert error.kind is ErrorKind.PLUGIN
    assert error.what.endswith("Greedy declares 'capacity', which is core's own key here")


@pytest.mark.parametrize("annotation", [complex, set[str], Path, bytes, Any, str | int, list, dict])
def test_an_annotation_that_no_configuration_can_hold_is_the_plugins_fault(annotation: Any) -> None:
    namespace = {"__annotations__": {"x": annotation}, "x": None}
    options = frozen(type("Odd", (), namespace))

    (error,) = faults({"tiers.a": {**TIER, "x": "1"}}, lambda s: options if s.spec is BackendSpec else None)

    assert error.kind is ErrorKind.PLUGIN
    assert "which a configuration cannot hold" in error.what


def test_annotations_that_cannot_be_read_are_the_plugins_fault() -> None:
    options = frozen(type("Odd", (), {"__annotations__": {"x": "Nowhere"}, "x": None}))

    (error,) = faults({"tiers.a": TIER}, lambda s: options if s.spec is BackendSpec else None)

    assert error.kind is ErrorKind.PLUGIN
    assert error.why == "name 'Nowhere' is not defined"


def test_options_that_are_no_attrs_class_are_the_plugins_fault() -> None:
    (error,) = faults({"tiers.a": TIER}, lambda s: dict if s.spec is BackendSpec else None)

    assert error.kind is ErrorKind.PLUGIN
    assert error.what == "tiers.a.use: the options of 'cpu' are not an attrs class: <class 'dict'>"


@frozen
class Ordered:
    low: int = field(default=0)
    high: int = field(default=9)

    @high.validator
    def _check(self, _attribute: Any, value: int) -> None:
        if value < self.low:
            raise ValueError("'high' must not be below 'low'")

    def __attrs_post_init__(self) -> None:
        if self.low == 5:
            raise ValueError("five is right out")


@pytest.mark.parametrize(
    ("keys", "messages"),
    [
        ({"low": 4, "high": 3}, ["tiers.a.high: 'high' must not be below 'low'"]),
        ({"low": 5}, ["tiers.a: five is right out"]),
        ({"low": "x", "high": 3}, ["tiers.a.low: expected a whole number, not the text 'x'"]),
    ],
)
def test_a_check_of_the_class_itself_is_reported_where_it_belongs(
    keys: dict[str, Any], messages: list[str]
) -> None:
    found = faults({"tiers.a": {**TIER, **keys}}, lambda s: Ordered if s.spec is BackendSpec else None)

    assert [error.what for error in found] == messages


def test_every_validator_speaks_even_beside_other_faults() -> None:
    found = faults({"chunk_tokens": -1, "instance": "' '", "zzz": 1, "tiers.a": {"use": "cpu"}})

    assert sorted(error.what for error in found) == [
        "chunk_tokens: must be above zero",
        "instance: must not be empty",
        "tiers.a: 'capacity' is missing",
        "zzz: unknown key",
    ]


SECRET = "hunter2-0042"


def test_a_secret_is_never_shown() -> None:
    config = load({"tiers.a": {**TIER, "token": SECRET, "tokens": {"x": SECRET}, "login": {"user": SECRET}}})

    assert config.tiers["a"].options.token == SECRET  # type: ignore[index, attr-defined]
    assert SECRET not in config_text(config) + str(config_data(config)) + str(config.facts())
    assert config.facts()["tiers.a.token"].value == "***"
    assert config.facts()["tiers.a.tokens.x"].value == "***"
    assert load({"tiers.a": TIER}).facts()["tiers.a.token"].value is None


@pytest.mark.parametrize("value", [[SECRET], {"x": SECRET}, 420042, 42.0042, True])
def test_a_bad_secret_is_not_quoted(value: Any) -> None:
    (error,) = faults({"tiers.a": {**TIER, "token": value}})

    assert error.what.startswith("tiers.a.token: expected text, not ")
    assert "42" not in str(error)
    assert "true" not in str(error)


@pytest.mark.parametrize(
    ("key", "value"), [("pin", "0042"), ("pin", "4_2"), ("lifetime", "42"), ("lifetime", "42x")]
)
def test_help_with_a_secret_does_not_quote_it(key: str, value: str) -> None:
    (error,) = faults({"tiers.a": {**TIER, key: value}})

    assert "42" not in str(error)


def test_a_choice_among_numbers_is_as_strict_as_a_number() -> None:
    assert load({"tiers.a": {**TIER, "level": 2}}).facts()["tiers.a.level"].value == 2
    for value in (True, 1.0, "'1'"):
        (error,) = faults({"tiers.a": {**TIER, "level": value}})
        assert error.what.startswith("tiers.a.level: expected one of 1, 2, not the ")


def test_what_is_shown() -> None:
    config = load({"plugins": ["a@b"], "tiers.a": {**TIER, "token": "x", "tokens": {"y": "z"}}})

    assert config_text(config) == (
        "plugins.0.name           a              kv_connector_extra_config\n"
        "plugins.0.distribution   b              kv_connector_extra_config\n"
        "plugins.0.on_error       fail           default\n"
        "chunk_tokens             256            default\n"
        "instance                 null           default\n"
        "model_identity           null           default\n"
        "runtime_dir              null           default\n"
        "tiers.a.use              cpu            kv_connector_extra_config\n"
        "tiers.a.capacity         1GiB           kv_connector_extra_config\n"
        "tiers.a.eviction.use     lru            default\n"
        "tiers.a.eviction.seed    7              default\n"
        "tiers.a.ttl              null           default\n"
        "tiers.a.max_pinned       0.5            default\n"
        "tiers.a.store            write_through  default\n"
        "tiers.a.in_flight        256MiB         default\n"
        "tiers.a.load_deadline    5s             default\n"
        "tiers.a.store_deadline   30s            default\n"
        "tiers.a.min_load_tokens  0              default\n"
        "tiers.a.retry_after      30s            default\n"
        "tiers.a.pinned           false          default\n"
        "tiers.a.slab             null           default\n"
        "tiers.a.window           [1, 2.0]       default\n"
        "tiers.a.retrying.times   9              default\n"
        "tiers.a.retrying.pause   500ms          default\n"
        "tiers.a.token            ***            kv_connector_extra_config\n"
        "tiers.a.tokens.y         ***            kv_connector_extra_config\n"
        "tiers.a.pin              ***            default\n"
        "tiers.a.lifetime         null           default\n"
        "tiers.a.login            null           default\n"
        "tiers.a.level            1              default\n"
        "connector.use            null           default\n"
        "connector.load           async          default\n"
        "connector.threads        2              default\n"
        "channel.use              null           default\n"
        "lookup.use               null           default\n"
        "p2p.use                  null           default\n"
        "p2p.pull                 true           default\n"
        "p2p.delay                false          default\n"
        "p2p.land_on              host           default\n"
        "p2p.buffer               128MiB         default\n"
        "p2p.keep                 true           default\n"
        "p2p.load_deadline        5s             default\n"
        "p2p.min_load_tokens      0              default\n"
        "p2p.in_flight            256MiB         default\n"
        "p2p.lease                30s            default\n"
        "p2p.guard                1s             default\n"
        "p2p.max_lent             0.25           default\n"
        "p2p.pause                10s            default\n"
        "staging.use              null           default\n"
        "staging.capacity         1GiB           default\n"
        "waive                    {}             default\n"
    )
    assert config_data(config)[8] == {
        "path": ["tiers", "a", "capacity"],
        "value": "1GiB",
        "origin": "kv_connector_extra_config",
    }
    assert config.facts()["tiers.a.capacity"].value == 2**30


def test_a_configuration_travels_to_another_process() -> None:
    config = load({"tiers.a": {**TIER, "retrying": {"times": 1}}})

    assert pickle.loads(pickle.dumps(config)) == config
    assert copy.deepcopy(config).leaves == config.leaves
