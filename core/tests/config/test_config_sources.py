"""Which sources count, which file is read, and how sources lie over each other."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kvferry.api import BackendSpec, ErrorKind, KVFerryError, KVFerryErrors
from kvferry.config import Config, ConfigSources, Selection, find_config, read_core


def none(_selection: Selection) -> type[Any] | None:
    return None


def load(file: Path | None, environment: Mapping[str, str], overrides: Mapping[str, Any]) -> Config:
    sources = ConfigSources(file=file, environment=environment, overrides=overrides)
    return read_core(sources).structure(none)


def only_fault(file: Path) -> str:
    with pytest.raises(KVFerryErrors) as caught:
        load(file, {}, {})
    (error,) = caught.value.errors
    return str(error)


def test_without_any_source_everything_is_default() -> None:
    config = load(None, {}, {})

    assert config == Config()
    assert config.chunk_tokens == 256
    assert {leaf.origin for leaf in config.leaves} == {"default"}


def test_foreign_variables_and_keys_are_ignored() -> None:
    variables = {
        "KVFERRY_PORT": "tcp://10.0.0.1:80",  # a Kubernetes service named kvferry
        "KVFERRY_SERVICE_HOST": "10.0.0.1",
        "KVFERRY_TIERS_SERVICE_HOST": "10.0.0.1",  # one named kvferry-tiers
        "KVFERRY_TIERS_PORT_80_TCP_ADDR": "10.0.0.1",
        "KVFERRY_INSTANCES": "tcp://10.0.0.1:80",
        "KVFERRY_HOME": "/opt",
        "KVFERRY": "x",
        "KVFERRY_CONFIG": "elsewhere.yaml",
        "PATH": "/bin",
    }

    assert load(None, variables, {"connectors": [1], "spec_name": object()}) == Config()


def test_the_process_environment_is_never_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY__CHUNK_TOKENS", "1")
    monkeypatch.setenv("KVFERRY_CONFIG", "/nowhere.yaml")

    assert load(None, {}, {}).chunk_tokens == 256
    assert find_config({}, {}) is None


@pytest.mark.parametrize(
    ("environment", "overrides", "expected"),
    [
        ({}, {}, None),
        ({"KVFERRY_CONFIG": "env.yaml"}, {}, Path("env.yaml")),
        ({"KVFERRY_CONFIG": "env.yaml"}, {"kvferry.config": "over.yaml"}, Path("over.yaml")),
        ({"KVFERRY_CONFIG": ""}, {"kvferry": {"config": "over.yaml"}}, Path("over.yaml")),
        ({}, {"kvferry.config": "a", "kvferry": {"config": "a"}}, Path("a")),
    ],
)
def test_the_file_is_chosen(
    environment: dict[str, str], overrides: dict[str, Any], expected: Path | None
) -> None:
    assert find_config(environment, overrides) == expected


@pytest.mark.parametrize(
    ("environment", "overrides", "message"),
    [
        (
            {"KVFERRY_CONFIG": " "},
            {},
            "env KVFERRY_CONFIG: expected the name of a file, not ' '\n"
            "  fix  name the configuration file, or leave it unset to use none",
        ),
        (
            {},
            {"kvferry.config": 5},
            "kv_connector_extra_config: kvferry.config: expected the name of a file, "
            "not a value of type int\n"
            "  fix  name the configuration file, or leave it unset to use none",
        ),
        (
            {},
            {"kvferry.config": "a", "kvferry": {"config": "b"}},
            "kv_connector_extra_config: kvferry.config: set twice, to different files\n"
            "  fix  keep one of the two",
        ),
    ],
)
def test_a_bad_name_of_a_file_is_explained(
    environment: dict[str, str], overrides: dict[str, Any], message: str
) -> None:
    with pytest.raises(KVFerryError) as caught:
        find_config(environment, overrides)

    assert str(caught.value) == message


def test_the_key_that_names_the_file_is_no_setting() -> None:
    overrides = {"kvferry.config": "a", "kvferry": {"config": "a", "chunk_tokens": 5}}

    assert load(None, {}, overrides).chunk_tokens == 5
    assert overrides["kvferry"] == {"config": "a", "chunk_tokens": 5}


def test_a_missing_file_is_one_fault(tmp_path: Path) -> None:
    assert only_fault(tmp_path / "no.yaml") == (
        f"{tmp_path}/no.yaml: no such configuration file\n"
        "  fix  correct the name, or leave it unset to use none"
    )


def test_what_is_not_a_regular_file_is_refused_without_waiting(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    remedy = "\n  fix  name the file itself, not a folder, a pipe or a device"
    assert only_fault(pipe) == f"{pipe}: the configuration is not a regular file{remedy}"
    assert only_fault(tmp_path) == f"{tmp_path}: the configuration is not a regular file{remedy}"


def test_a_file_behind_a_file_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "a").touch()

    assert only_fault(tmp_path / "a" / "b") == (
        f"{tmp_path}/a/b: the configuration cannot be read\n  why  Not a directory\n  fix  correct the name"
    )


def test_an_unprintable_name_can_be_reported() -> None:
    message = only_fault(Path("a\udce9\n\0b"))

    assert message.isascii()
    assert message.startswith(r"'a\udce9\n\x00b': the configuration cannot be read")


def test_sources_lie_over_each_other_key_by_key(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "tiers:\n  fast: {use: cpu, capacity: 1GiB, eviction: lru}\n  slow: {use: ssd, capacity: 2GiB}\n"
    )
    variables = {
        "KVFERRY__TIERS__FAST__CAPACITY": "3GiB",
        "KVFERRY__Tiers__Slow__Eviction": "s3fifo",
        "KVFERRY__TIERS__LAST": "{use: cpu, capacity: 1MiB}",
    }
    overrides = {"kvferry.tiers.slow": {"capacity": "4GiB"}, "kvferry.tiers.fast.eviction.use": "x"}

    config = load(file, variables, overrides)

    assert list(config.tiers) == ["fast", "slow", "last"]
    assert {
        str(name): (tier.use, tier.capacity, tier.eviction.use) for name, tier in config.tiers.items()
    } == {
        "fast": ("cpu", 3 * 2**30, "x"),
        "slow": ("ssd", 4 * 2**30, "s3fifo"),
        "last": ("cpu", 2**20, "lru"),
    }
    keys = (".use", ".capacity")
    origins = {path: fact.origin for path, fact in config.facts().items() if path.endswith(keys)}
    assert origins == {
        "tiers.fast.use": f"{file}:2:15",
        "tiers.fast.capacity": "env KVFERRY__TIERS__FAST__CAPACITY",
        "tiers.fast.eviction.use": "kv_connector_extra_config",
        "tiers.slow.use": f"{file}:3:15",
        "tiers.slow.capacity": "kv_connector_extra_config",
        "tiers.slow.eviction.use": "env KVFERRY__Tiers__Slow__Eviction",
        "tiers.last.use": "env KVFERRY__TIERS__LAST",
        "tiers.last.capacity": "env KVFERRY__TIERS__LAST",
        "tiers.last.eviction.use": "default",
        "connector.use": "default",
        "channel.use": "default",
        "lookup.use": "default",
        "p2p.use": "default",
        "staging.use": "default",
        "staging.capacity": "default",
    }


def test_a_list_is_replaced_as_a_whole(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("plugins: [a, b]\n")

    raw = read_core(
        ConfigSources(
            file=file, environment={"KVFERRY__PLUGINS": "[c, {name: d, on_error: skip}]"}, overrides={}
        )
    )

    assert [entry.name for entry in raw.plugins] == ["c", "d"]
    assert raw.origin(("plugins", "1")) == "env KVFERRY__PLUGINS"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("tcp://*:5555", "tcp://*:5555"),
        ("a: b", "a: b"),
        ("redis://:p#ss@host #1", "redis://:p#ss@host #1"),
        ("*", "*"),
        ("- a", "- a"),
        ("no", "no"),
        ("0123", "0123"),
        (" padded ", "padded"),
        ("'5'", "5"),
        ('"[::1]:9960"', "[::1]:9960"),
        (r'"\ud83d\ude80"', "\U0001f680"),
        ("08", "08"),
        ("1", "1"),
        ("1.10", "1.10"),
        ("true", "true"),
        ("null", None),
        ("", None),
    ],
)
def test_text_of_a_variable_or_override_is_read_by_the_rules_of_yaml(text: str, value: str | None) -> None:
    assert load(None, {"KVFERRY__MODEL_IDENTITY": text}, {}).model_identity == value
    assert load(None, {}, {"kvferry.model_identity": text}).model_identity == value


def test_no_subclass_of_a_plain_type_leaks_out() -> None:
    class Text(str):
        __slots__ = ()

    class Number(int):
        pass

    tiers = {Text("a"): {"use": Text("cpu"), "capacity": "1GiB"}}
    config = load(
        None,
        {},
        {"kvferry": {"instance": Text("a"), "chunk_tokens": Number(5), "tiers": tiers}},
    )

    assert type(config.instance) is str
    assert type(config.chunk_tokens) is int
    assert [(type(key), type(tier.use)) for key, tier in config.tiers.items()] == [(str, str)]


def test_the_letter_case_of_a_variable_gives_way_to_any_other_spelling(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("waive: {Z9: file}\n")

    config = load(
        file,
        {"KVFERRY__WAIVE__CPU001": "variable", "KVFERRY__WAIVE__Z9": "variable"},
        {"kvferry.waive.CPU001": "override"},
    )

    assert list(config.waive.items()) == [("Z9", "variable"), ("CPU001", "override")]
    assert config.facts()["waive.CPU001"].origin == "kv_connector_extra_config"


def test_nothing_is_called_missing_where_a_key_could_not_be_read(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("tiers: {a: {capacity: 1GiB}}\n")

    raw = read_core(ConfigSources(file=file, environment={"KVFERRY__TIERS__A": "{1: cpu}"}, overrides={}))

    assert [error.what for error in raw.faults] == ["tiers.a: a key must be text, not '1'"]


def test_plugins_are_not_judged_while_the_file_is_unreadable(tmp_path: Path) -> None:
    def refuse(selection: Selection) -> type[Any] | None:
        raise KVFerryError(f"no plugin for {selection.use}", kind=ErrorKind.PLUGIN)

    raw = read_core(
        ConfigSources(
            file=tmp_path / "no.yaml",
            environment={"KVFERRY__TIERS__A": "{use: cpu, capacity: 1GiB}"},
            overrides={},
        )
    )
    with pytest.raises(KVFerryErrors) as caught:
        raw.structure(refuse)

    assert raw.selections == ()
    assert [error.what for error in caught.value.errors] == ["no such configuration file"]


def test_plugins_are_known_though_much_else_is_wrong(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("plugins: [a, {nam: b}, c@d]\ntiers: {x: {use: cpu}}\nchunk_tokens: x\n")

    raw = read_core(ConfigSources(file=file, environment={}, overrides={}))

    assert [(entry.name, entry.distribution) for entry in raw.plugins] == [("a", None), ("c", "d")]
    assert raw.plugins[1].origin == f"{file}:1:24"
    assert (("tiers", "x"), BackendSpec, "cpu") in [
        (selection.path, selection.spec, selection.use) for selection in raw.selections
    ]
    assert len(raw.faults) == 4


def test_several_configurations_can_be_reported_together(tmp_path: Path) -> None:
    names = []
    for name in ("a.yaml", "b.yaml"):
        (tmp_path / name).write_text("chunk_tokens: 0\ninstance: 1\n")
        with pytest.raises(KVFerryErrors) as caught:
            load(tmp_path / name, {}, {})
        assert caught.value.what == f"{tmp_path / name}: 2 faults"
        names += [error.where for error in caught.value.errors]

    assert names == [
        f"{tmp_path}/{name}:{place}" for name in ("a.yaml", "b.yaml") for place in ("1:15", "2:11")
    ]
