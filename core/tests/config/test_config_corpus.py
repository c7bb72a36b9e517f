"""Bad and odd configurations with the exact text that a user gets to read."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from attrs import field, frozen, validators

from kvferry.api import BackendSpec, ErrorKind, EvictionSpec, KVFerryError, KVFerryErrors, Retry
from kvferry.config import (
    ByteSize,
    Config,
    ConfigSources,
    Duration,
    Selection,
    read_core,
)


class Load(enum.StrEnum):
    EAGER = "eager"
    LAZY = "lazy"


@frozen(kw_only=True)
class CpuOptions:
    first_touch: bool = True
    threads: int = field(default=1, validator=validators.ge(1))
    ratio: float = 0.5
    load: Load = Load.LAZY
    wait: Duration = field(default=Duration(0.25))
    hosts: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(factory=dict)
    buffer: ByteSize | None = None
    password: str | None = field(default=None, metadata={"secret": True})


@frozen(kw_only=True)
class SsdOptions:
    path: str = field(metadata={"doc": "folder of the tier"})


@frozen(kw_only=True)
class S3FifoOptions:
    small: float = field(default=0.1, validator=validators.lt(1.0))


BACKENDS: Mapping[str | None, type] = {"cpu": CpuOptions, "ssd": SsdOptions}
EVICTIONS: Mapping[str | None, type | None] = {"lru": None, "s3fifo": S3FifoOptions}


def resolve(selection: Selection) -> type[Any] | None:
    known: Mapping[str | None, type | None]
    if selection.spec is BackendSpec:
        known, what = BACKENDS, "backend"
    elif selection.spec is EvictionSpec:
        known, what = EVICTIONS, "eviction policy"
    else:
        return None
    if selection.use not in known:
        raise KVFerryError(
            f"no plugin offers the {what} {selection.use!r}",
            kind=ErrorKind.PLUGIN,
            remedy=f"known: {', '.join(str(name) for name in known)}",
        )
    return known[selection.use]


def load(
    text: str | bytes | None,
    environment: Mapping[str, str] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Config:
    file = None
    if text is not None:
        file = Path("config.yaml")
        file.write_bytes(text if isinstance(text, bytes) else dedent(text).encode())
    sources = ConfigSources(file=file, environment=environment or {}, overrides=overrides or {})
    return read_core(sources).structure(resolve)


def faults(*arguments: Any) -> list[str]:
    with pytest.raises(KVFerryErrors) as caught:
        load(*arguments)
    assert all(error.retry is Retry.AFTER_CHANGE for error in caught.value.errors)
    return [str(error) for error in caught.value.errors]


@pytest.fixture(autouse=True)
def _in_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


CPU = "tiers:\n  cpu: {use: cpu, capacity: 1GiB, "

BAD: dict[str, tuple[str | bytes, list[str]]] = {
    # What YAML itself gets wrong
    "empty": ("", ["config.yaml:1:1: the file is empty"]),
    "only-comments": ("# tiers: {}\n\n", ["config.yaml:1:1: the file is empty"]),
    "only-a-marker": ("---\n", ["config.yaml:2:1: the file is empty"]),
    "top-is-a-list": (
        "- cpu\n",
        [
            "config.yaml:1:1: expected a mapping at the top of the file\n"
            "  fix  write lines such as 'tiers: {}'"
        ],
    ),
    "top-is-text": (
        "tiers\n",
        [
            "config.yaml:1:1: expected a mapping at the top of the file\n"
            "  fix  write lines such as 'tiers: {}'"
        ],
    ),
    "tab": (
        "tiers:\n\tcpu: {}\n",
        ["config.yaml:2:1: a tab stands where YAML wants spaces\n  fix  indent with spaces"],
    ),
    "unclosed": (
        "tiers: {cpu: {use: cpu\n",
        [
            "config.yaml:2:1: not valid YAML: expected ',' or '}', but got '<stream end>'\n"
            "  why  while parsing a flow mapping"
        ],
    ),
    "colon-in-value": (
        "instance: a: b\n",
        ["config.yaml:1:12: not valid YAML: mapping values are not allowed here"],
    ),
    "impossible-escape": (
        'instance: "\\UFFFFFFFF"\n',
        [
            "config.yaml:1:14: not valid YAML: an escape or a version is out of range",
        ],
    ),
    "not-utf-8": (
        b"instance: a\nmodel_identity: caf\xe9\n",
        ["config.yaml:2:20: the file is not UTF-8\n  fix  save the file as UTF-8"],
    ),
    "not-utf-8-behind-a-byte-order-mark": (
        b"\xef\xbb\xbfinstance: \xff\n",
        ["config.yaml:1:11: the file is not UTF-8\n  fix  save the file as UTF-8"],
    ),
    "control-character": (
        "instance: a\ntiers: {\x1b[31m: 1}\n",
        ["config.yaml:2:9: the file holds the unprintable character U+001B\n  fix  write plain UTF-8 text"],
    ),
    "escaped-control-character": (
        'instance: "a\\0b"\n',
        ["config.yaml:1:11: instance: the value holds the unprintable character U+0000"],
    ),
    "two-documents": (
        "instance: a\n---\ninstance: b\n",
        ["config.yaml:2:1: a second YAML document starts here\n  fix  keep one document in a file"],
    ),
    "too-deep": (
        "tiers: " + "[" * 40 + "]" * 40 + "\n",
        ["config.yaml:1:40: nested deeper than 32 levels"],
    ),
    "too-large": (
        b"#" * 10_000_000,
        [
            "config.yaml: the file is too large: more than 256 KiB\n"
            "  fix  check that this is a kvferry configuration"
        ],
    ),
    "duplicate-key": (
        "chunk_tokens: 128\ninstance: a\nchunk_tokens: 256\n",
        [
            "config.yaml:3:1: chunk_tokens: duplicate key, first at config.yaml:1:1\n"
            "  fix  keep one of the two"
        ],
    ),
    "aliases": (
        "tiers:\n  cpu: &a {use: cpu, capacity: 1GiB}\n  gpu: *a\n",
        [
            "config.yaml:2:8: tiers.cpu: anchors are not supported\n  fix  remove the anchor",
            "config.yaml:3:8: tiers.gpu: aliases are not supported\n  fix  write the value out",
        ],
    ),
    "merge-key": (
        "tiers:\n  cpu: {<<: {use: cpu}, capacity: 1GiB}\n",
        ["config.yaml:2:9: tiers.cpu: merge keys are not supported: <<\n  fix  write the keys out"],
    ),
    "tag": (
        "chunk_tokens: !!int '256'\n",
        [
            "config.yaml:1:15: chunk_tokens: tags are not supported\n  fix  remove it",
            "config.yaml:1:15: chunk_tokens: expected a whole number, not the text '256'\n"
            "  fix  remove the quotes",
        ],
    ),
    "key-is-a-number": (
        "tiers:\n  1: {use: cpu, capacity: 1GiB}\n",
        ["config.yaml:2:3: tiers: a key must be text, not '1'\n  fix  put quotes around the key"],
    ),
    "key-is-a-list": (
        "tiers: {[a]: 1}\n",
        ["config.yaml:1:9: tiers: a key must be text, not a list or mapping"],
    ),
    # Keys
    "unknown-key": (
        "chunk_token: 256\n",
        ["config.yaml:1:1: chunk_token: unknown key\n  fix  did you mean 'chunk_tokens'?"],
    ),
    "unknown-key-unlike-any": (
        "zzz: 1\n",
        [
            "config.yaml:1:1: zzz: unknown key\n  fix  known keys: plugins, chunk_tokens, instance, "
            "model_identity, runtime_dir, tiers, connector, waive"
        ],
    ),
    "unknown-key-of-a-plugin": (
        CPU + "first-touch: true}\n",
        ["config.yaml:2:35: tiers.cpu.first-touch: unknown key\n  fix  did you mean 'first_touch'?"],
    ),
    "unknown-key-of-a-policy": (
        CPU + "eviction: {use: s3fifo, smal: 0.2}}\n",
        ["config.yaml:2:59: tiers.cpu.eviction.smal: unknown key\n  fix  did you mean 'small'?"],
    ),
    "key-of-a-policy-without-options": (
        CPU + "eviction: {use: lru, small: 0.2}}\n",
        ["config.yaml:2:56: tiers.cpu.eviction.small: unknown key\n  fix  known keys: use"],
    ),
    "misspelt-core-key": (
        "tiers:\n  cpu: {use: cpu, capcity: 1GiB}\n",
        [
            "config.yaml:2:3: tiers.cpu: 'capacity' is missing\n"
            "  fix  set tiers.cpu.capacity: how much the tier may hold, such as 16GiB",
            "config.yaml:2:19: tiers.cpu.capcity: unknown key\n  fix  did you mean 'capacity'?",
        ],
    ),
    "misspelt-core-key-while-the-backend-is-unknown": (
        "tiers:\n  cpu: {use: cpuu, capcity: 1GiB, own: 1}\n",
        [
            "config.yaml:2:3: tiers.cpu: 'capacity' is missing\n"
            "  fix  set tiers.cpu.capacity: how much the tier may hold, such as 16GiB",
            "config.yaml:2:14: tiers.cpu.use: no plugin offers the backend 'cpuu'\n  fix  known: cpu, ssd",
            "config.yaml:2:20: tiers.cpu.capcity: unknown key\n  fix  did you mean 'capacity'?",
        ],
    ),
    "missing-key-of-a-plugin": (
        "tiers:\n  ssd: {use: ssd, capacity: 1GiB}\n",
        ["config.yaml:2:3: tiers.ssd: 'path' is missing\n  fix  set tiers.ssd.path: folder of the tier"],
    ),
    "tier-without-anything": (
        "tiers:\n  cpu:\n",
        [
            "config.yaml:2:7: tiers.cpu: expected a mapping, not nothing (null)\n"
            "  fix  write {} or remove the key"
        ],
    ),
    "name-of-a-tier": (
        "tiers:\n  CPU.0: {use: cpu, capacity: 1GiB}\n",
        [
            "config.yaml:2:3: tiers.'CPU.0': a tier's name is made of a-z, 0-9 and single '_' or "
            "'-' inside\n  fix  rename it, for example ssd_2"
        ],
    ),
    "unknown-policy": (
        CPU + "eviction: lfu}\n",
        [
            "config.yaml:2:45: tiers.cpu.eviction.use: no plugin offers the eviction policy 'lfu'\n"
            "  fix  known: lru, s3fifo"
        ],
    ),
    # Values
    "quoted-boolean": (
        CPU + "first_touch: 'false'}\n",
        [
            "config.yaml:2:48: tiers.cpu.first_touch: expected true or false, not the text 'false'"
            "\n  fix  remove the quotes"
        ],
    ),
    "boolean-of-yaml-1.1": (
        CPU + "first_touch: no}\n",
        [
            "config.yaml:2:48: tiers.cpu.first_touch: expected true or false, not the text 'no'\n"
            "  fix  write false"
        ],
    ),
    "boolean-as-number": (
        CPU + "first_touch: 1}\n",
        ["config.yaml:2:48: tiers.cpu.first_touch: expected true or false, not the number 1"],
    ),
    "size-without-unit": (
        "tiers: {cpu: {use: cpu, capacity: 5000000000}}\n",
        [
            "config.yaml:1:35: tiers.cpu.capacity: expected a size with a unit, not the number "
            "5000000000\n"
            "  fix  write a number and a unit, such as 16GiB (1024-based) or 16GB (1000-based)"
        ],
    ),
    "size-as-float": (
        "tiers: {cpu: {use: cpu, capacity: 5e9}}\n",
        [
            "config.yaml:1:35: tiers.cpu.capacity: expected a size with a unit, not the number "
            "5000000000.0\n"
            "  fix  write a number and a unit, such as 16GiB (1024-based) or 16GB (1000-based)"
        ],
    ),
    "size-with-unit-in-small-letters": (
        "tiers: {cpu: {use: cpu, capacity: 16gib}}\n",
        [
            "config.yaml:1:35: tiers.cpu.capacity: unknown unit 'gib' in '16gib'; did you mean "
            "'GiB'\n"
            "  fix  write a number and a unit, such as 16GiB (1024-based) or 16GB (1000-based)"
        ],
    ),
    "size-negative": (
        "tiers: {cpu: {use: cpu, capacity: -1GiB}}\n",
        [
            "config.yaml:1:35: tiers.cpu.capacity: a size cannot be negative: '-1GiB'\n"
            "  fix  write a number and a unit, such as 16GiB (1024-based) or 16GB (1000-based)"
        ],
    ),
    "size-zero": (
        "tiers: {cpu: {use: cpu, capacity: 0B}}\n",
        ["config.yaml:1:35: tiers.cpu.capacity: must be above zero"],
    ),
    "size-not-a-number": (
        "tiers: {cpu: {use: cpu, capacity: .nan}}\n",
        [
            "config.yaml:1:35: tiers.cpu.capacity: expected a size with a unit, not the number "
            "nan\n"
            "  fix  write a number and a unit, such as 16GiB (1024-based) or 16GB (1000-based)"
        ],
    ),
    "duration-without-unit": (
        CPU + "wait: 30}\n",
        [
            "config.yaml:2:41: tiers.cpu.wait: expected a duration with a unit, not the number 30\n"
            "  fix  write a number and a unit, such as 250ms, 30s, 5min or 2h"
        ],
    ),
    "number-with-underscore": (
        "chunk_tokens: 1_000\n",
        [
            "config.yaml:1:15: chunk_tokens: expected a whole number, not the text '1_000'\n"
            "  fix  write 1000, without leading zeros or underscores"
        ],
    ),
    "number-with-leading-zero": (
        "chunk_tokens: 0123\n",
        [
            "config.yaml:1:15: chunk_tokens: expected a whole number, not the text '0123'\n"
            "  fix  write 123, without leading zeros or underscores"
        ],
    ),
    "number-base-60": (
        "chunk_tokens: 12:30\n",
        ["config.yaml:1:15: chunk_tokens: expected a whole number, not the text '12:30'"],
    ),
    "number-true": (
        "chunk_tokens: true\n",
        ["config.yaml:1:15: chunk_tokens: expected a whole number, not the truth value true"],
    ),
    "number-fraction": (
        "chunk_tokens: 1.9\n",
        ["config.yaml:1:15: chunk_tokens: expected a whole number, not the number 1.9"],
    ),
    "number-null": (
        "chunk_tokens: null\n",
        ["config.yaml:1:15: chunk_tokens: expected a whole number, not nothing (null)"],
    ),
    "number-zero": ("chunk_tokens: 0\n", ["config.yaml:1:15: chunk_tokens: must be above zero"]),
    "number-too-large": (
        "chunk_tokens: 99999999999999999999\n",
        ["config.yaml:1:15: chunk_tokens: the value holds a whole number beyond 64 bits"],
    ),
    "float-infinite": (
        CPU + "ratio: .inf}\n",
        ["config.yaml:2:42: tiers.cpu.ratio: expected a finite number, not the number inf"],
    ),
    "text-as-number": (
        "instance: 1.10\n",
        ["config.yaml:1:11: instance: expected text, not the number 1.1\n  fix  put quotes around it"],
    ),
    "text-blank": ("instance: ' '\n", ["config.yaml:1:11: instance: must not be empty"]),
    "list-as-text": (
        CPU + "hosts: 'tcp://a:1'}\n",
        [
            "config.yaml:2:42: tiers.cpu.hosts: expected a list, not the text 'tcp://a:1'\n"
            "  fix  write a list of one: ['tcp://a:1']"
        ],
    ),
    "item-of-a-list": (
        CPU + "hosts: [a, 1, b, null]}\n",
        [
            "config.yaml:2:46: tiers.cpu.hosts.1: expected text, not the number 1\n"
            "  fix  put quotes around it",
            "config.yaml:2:52: tiers.cpu.hosts.3: expected text, not nothing (null)",
        ],
    ),
    "value-of-a-mapping": (
        CPU + "labels: {a: b, c: true}}\n",
        [
            "config.yaml:2:53: tiers.cpu.labels.c: expected text, not the truth value true\n"
            "  fix  put quotes around it"
        ],
    ),
    "choice": (
        CPU + "load: eagre}\n",
        ["config.yaml:2:41: tiers.cpu.load: expected one of 'eager', 'lazy', not the text 'eagre'"],
    ),
    "validator-of-a-plugin": (
        CPU + "threads: 0}\n",
        ["config.yaml:2:44: tiers.cpu.threads: 'threads' must be >= 1: 0"],
    ),
    "secret-is-not-quoted": (
        CPU + "password: 12345}\n",
        [
            "config.yaml:2:45: tiers.cpu.password: expected text, not this hidden value\n"
            "  fix  put quotes around it"
        ],
    ),
    "plugin-without-name": (
        "plugins: [{on_error: skip}, '', 7]\n",
        [
            "config.yaml:1:11: plugins.0: 'name' is missing\n  fix  set plugins.0.name: name of the plugin",
            "config.yaml:1:29: plugins.1.name: must not be empty",
            "config.yaml:1:33: plugins.2: expected a mapping, not the number 7",
        ],
    ),
    "plugin-of-no-distribution": (
        "plugins: [a@]\n",
        ["config.yaml:1:11: plugins.0.distribution: must not be empty"],
    ),
    "plugin-of-two-distributions": (
        "plugins: [{name: a@b, distribution: c}]\n",
        ["config.yaml:1:18: plugins.0.name: names a distribution although 'distribution' does, too"],
    ),
    "plugin-policy": (
        "plugins: [{name: a, on_error: ignore}]\n",
        ["config.yaml:1:31: plugins.0.on_error: expected one of 'fail', 'skip', not the text 'ignore'"],
    ),
    "waiver-without-reason": (
        "waive: {CPU001: '', CPU002: }\n",
        [
            "config.yaml:1:17: waive.CPU001: a waiver needs a reason\n"
            "  fix  say in a few words why the rule may be ignored here",
            "config.yaml:1:28: waive.CPU002: expected the reason as text, not nothing (null)\n"
            "  fix  say in a few words why the rule may be ignored here",
        ],
    ),
    "waiver-twice": (
        "waive: {CPU001: a, cpu001: b}\n",
        ["config.yaml:1:20: waive.cpu001: the same as an earlier key: 'CPU001'"],
    ),
    "all-in-one-run": (
        """\
        chunk_tokens: "256"
        chunk_token: 1
        chunk_tokens: 3
        tiers:
          cpu: {use: cpu, capacity: 16GiB, threads: 0, ratio: x, eviction: {use: s3fifo, small: 2}}
        """,
        [
            "config.yaml:1:15: chunk_tokens: expected a whole number, not the text '256'\n"
            "  fix  remove the quotes",
            "config.yaml:2:1: chunk_token: unknown key\n  fix  did you mean 'chunk_tokens'?",
            "config.yaml:3:1: chunk_tokens: duplicate key, first at config.yaml:1:1\n"
            "  fix  keep one of the two",
            "config.yaml:5:45: tiers.cpu.threads: 'threads' must be >= 1: 0",
            "config.yaml:5:55: tiers.cpu.ratio: expected a finite number, not the text 'x'",
            "config.yaml:5:89: tiers.cpu.eviction.small: 'small' must be < 1.0: 2.0",
        ],
    ),
}


@pytest.mark.parametrize(("text", "expected"), BAD.values(), ids=BAD)
def test_a_bad_file_is_explained(text: str | bytes, expected: list[str]) -> None:
    assert faults(text) == expected


BAD_VARIABLES: dict[str, tuple[dict[str, str], list[str]]] = {
    "unknown": (
        {"KVFERRY__CHUNK_TOKNES": "1"},
        ["env KVFERRY__CHUNK_TOKNES: chunk_toknes: unknown key\n  fix  did you mean KVFERRY__CHUNK_TOKENS?"],
    ),
    "unknown-below-a-tier": (
        {"KVFERRY__TIERS": "{cpu: {use: cpu, capacity: 1GiB}}", "KVFERRY__TIERS__CPU__THREAD": "1"},
        [
            "env KVFERRY__TIERS__CPU__THREAD: tiers.cpu.thread: unknown key\n"
            "  fix  did you mean KVFERRY__TIERS__CPU__THREADS?"
        ],
    ),
    "the-file": (
        {"KVFERRY__CONFIG": "a.yaml"},
        ["env KVFERRY__CONFIG: config: unknown key\n  fix  name the file with KVFERRY_CONFIG"],
    ),
    "no-name": (
        {"KVFERRY__": "1", "KVFERRY__TIERS____USE": "cpu"},
        [
            "env KVFERRY__: the variable does not name a setting\n"
            "  fix  write KVFERRY__KEY, with two underscores between levels",
            "env KVFERRY__TIERS____USE: the variable does not name a setting\n"
            "  fix  write KVFERRY__KEY, with two underscores between levels",
        ],
    ),
    "twice-by-case": (
        {"KVFERRY__INSTANCE": "a", "kvferry__instance": "b"},
        [
            "env kvferry__instance: instance: set twice, also by env KVFERRY__INSTANCE\n"
            "  fix  keep one of the two"
        ],
    ),
    "twice-by-level": (
        {"KVFERRY__CONNECTOR": "{use: a}", "KVFERRY__CONNECTOR__USE": "b"},
        [
            "env KVFERRY__CONNECTOR__USE: connector.use: set twice, also by env KVFERRY__CONNECTOR"
            "\n  fix  keep one of the two"
        ],
    ),
    "empty": (
        {"KVFERRY__CHUNK_TOKENS": ""},
        [
            "env KVFERRY__CHUNK_TOKENS: chunk_tokens: expected a whole number, not nothing (null)",
        ],
    ),
    "unclosed": (
        {"KVFERRY__PLUGINS": "[a"},
        [
            "env KVFERRY__PLUGINS: plugins: not valid YAML: expected ',' or ']', but got "
            "'<stream end>'\n  why  while parsing a flow sequence"
        ],
    ),
    "block-style": (
        {"KVFERRY__TIERS": '"cpu": 1'},
        [
            "env KVFERRY__TIERS: tiers: write a mapping in braces and a list in brackets",
        ],
    ),
    "one-plugin-without-brackets": (
        {"KVFERRY__PLUGINS": "backend_cpu"},
        [
            "env KVFERRY__PLUGINS: plugins: expected a list, not the text 'backend_cpu'\n"
            "  fix  write a list of one: ['backend_cpu']"
        ],
    ),
    "not-utf-8": (
        {"KVFERRY__INSTANCE": "caf\udce9"},
        [
            "env KVFERRY__INSTANCE: instance: the value holds the unprintable character U+DCE9",
        ],
    ),
}


@pytest.mark.parametrize(("variables", "expected"), BAD_VARIABLES.values(), ids=BAD_VARIABLES)
def test_a_bad_variable_is_explained(variables: dict[str, str], expected: list[str]) -> None:
    assert faults(None, variables) == expected


BAD_OVERRIDES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "unknown": (
        {"kvferry.chunk_token": 1},
        ["kv_connector_extra_config: chunk_token: unknown key\n  fix  did you mean 'kvferry.chunk_tokens'?"],
    ),
    "underscore-for-dot": (
        {"kvferry_chunk_tokens": 1, "Kvferry.instance": "a"},
        [
            "kv_connector_extra_config: 'kvferry_chunk_tokens' does not name a setting\n"
            "  fix  write 'kvferry.' and the dotted name of a setting",
            "kv_connector_extra_config: 'Kvferry.instance' does not name a setting\n"
            "  fix  write 'kvferry.' and the dotted name of a setting",
        ],
    ),
    "not-a-mapping": (
        {"kvferry": 3},
        ["kv_connector_extra_config: 'kvferry' must hold a mapping of settings"],
    ),
    "set-twice": (
        {"kvferry": {"chunk_tokens": 1}, "kvferry.chunk_tokens": 2},
        ["kv_connector_extra_config: chunk_tokens: set twice\n  fix  keep one of the two"],
    ),
    "not-json": (
        {"kvferry.instance": object()},
        ["kv_connector_extra_config: instance: a value of type object cannot be configured"],
    ),
    "huge": (
        {"kvferry.chunk_tokens": 10**5000},
        ["kv_connector_extra_config: chunk_tokens: the value is a whole number beyond 64 bits"],
    ),
    "not-finite": (
        {"kvferry.chunk_tokens": float("nan")},
        [
            "kv_connector_extra_config: chunk_tokens: expected a whole number, not the number nan",
        ],
    ),
}


@pytest.mark.parametrize(("overrides", "expected"), BAD_OVERRIDES.values(), ids=BAD_OVERRIDES)
def test_a_bad_override_is_explained(overrides: dict[str, Any], expected: list[str]) -> None:
    assert sorted(faults(None, None, overrides)) == sorted(expected)


def test_an_override_that_holds_itself_is_explained() -> None:
    endless: dict[str, Any] = {}
    endless["tiers"] = endless

    found = faults(None, None, {"kvferry": endless})

    assert any(line.endswith("nested deeper than 32 levels") for line in found)


def test_faults_of_all_sources_come_in_one_run_and_in_order() -> None:
    found = faults(
        "chunk_tokens: x\ntiers: 1\n",
        {"KVFERRY__INSTANCE": "1"},
        {"kvferry.waive": {"CPU001": ""}},
    )

    assert [line.partition(": ")[0] for line in found] == [
        "config.yaml:1:15",
        "config.yaml:2:8",
        "env KVFERRY__INSTANCE",
        "kv_connector_extra_config",
    ]


def test_an_unreadable_file_does_not_hide_the_other_sources_nor_invent_faults() -> None:
    found = faults(
        "tiers: [\n",
        {"KVFERRY__TIERS__CPU__CAPACITY": "1GiB", "KVFERRY__INSTANC": "a"},
    )

    # The tier's `use` stands in the file, so it must not be called missing.
    assert [line.splitlines()[0] for line in found] == [
        "config.yaml:2:1: not valid YAML: expected the node content, but found '<stream end>'",
        "env KVFERRY__INSTANC: instanc: unknown key",
    ]


ODD: dict[str, tuple[str, str, object]] = {
    "octal": ("chunk_tokens: 0o400\n", "chunk_tokens", 256),
    "hexadecimal": ("chunk_tokens: 0x100\n", "chunk_tokens", 256),
    "plus": ("chunk_tokens: +256\n", "chunk_tokens", 256),
    "text-no": ("instance: no\n", "instance", "no"),
    "text-on": ("instance: on\n", "instance", "on"),
    "text-time": ("instance: 12:30\n", "instance", "12:30"),
    "text-leading-zero": ("instance: 0123\n", "instance", "0123"),
    "text-date": ("instance: 2024-01-01\n", "instance", "2024-01-01"),
    "text-two-dots": ("instance: 1.2.3\n", "instance", "1.2.3"),
    "text-quoted-null": ("instance: 'null'\n", "instance", "null"),
    "null": ("instance: ~\n", "instance", None),
    "binary-unit": ("tiers: {c: {use: cpu, capacity: 1.5GiB}}\n", "tiers.c.capacity", 3 * 2**29),
    "decimal-unit": ("tiers: {c: {use: cpu, capacity: 5GB}}\n", "tiers.c.capacity", 5 * 10**9),
    "space-before-unit": ("tiers: {c: {use: cpu, capacity: 5 GB}}\n", "tiers.c.capacity", 5 * 10**9),
    "byte-order-mark": ("\ufeffinstance: a\n", "instance", "a"),
    "windows-line-ends": ("instance: a\r\nchunk_tokens: 5\r\n", "chunk_tokens", 5),
    "float-from-int": (CPU + "ratio: 1}\n", "tiers.cpu.ratio", 1.0),
    "choice": (CPU + "load: eager}\n", "tiers.cpu.load", "eager"),
    "duration": (CPU + "wait: 5min}\n", "tiers.cpu.wait", 300.0),
    "empty-list": (CPU + "hosts: []}\n", "tiers.cpu.hosts", ()),
    "merge-sign-in-quotes": (CPU + "labels: {'<<': a}}\n", "tiers.cpu.labels.<<", "a"),
    "policy-by-name": (CPU + "eviction: s3fifo}\n", "tiers.cpu.eviction.small", 0.1),
    "plugin@distribution": ("plugins: [a@b-c]\n", "plugins.0.distribution", "b-c"),
    "plugin-in-full": ("plugins: [{name: a@b, on_error: skip}]\n", "plugins.0.name", "a"),
    "waiver": ("waive: {cpu001: because}\n", "waive.CPU001", "because"),
}


@pytest.mark.parametrize(("text", "path", "value"), ODD.values(), ids=ODD)
def test_an_odd_but_good_value_is_read_as_meant(text: str, path: str, value: object) -> None:
    fact = load(text).facts()[path]

    assert fact.value == value
    assert type(fact.value) is type(value)
