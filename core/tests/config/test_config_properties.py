"""Laws of the configuration layer that hold for any input."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from attrs import field, frozen, validators
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from kvferry.api import EvictionSpec, KVFerryError, KVFerryErrors
from kvferry.config import (
    ByteSize,
    Config,
    ConfigSources,
    Duration,
    Selection,
    config_data,
    config_text,
    find_config,
    format_size,
    read_core,
)

from .documents import document


@frozen(kw_only=True)
class Options:
    flag: bool = False
    ratio: float = 1.0
    wait: Duration = field(default=Duration(1.0))
    names: tuple[str, ...] = ()
    sizes: list[ByteSize] = field(factory=list)
    labels: Mapping[str, str | None] = field(factory=dict)
    note: str | None = None
    level: int = field(default=0, validator=validators.ge(0))


def resolve(selection: Selection) -> type[Any] | None:
    return None if selection.spec is EvictionSpec else Options


def load(
    file: Path | None = None,
    environment: Mapping[str, str] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Config:
    sources = ConfigSources(file=file, environment=environment or {}, overrides=overrides or {})
    return read_core(sources).structure(resolve)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("config") / "config.yaml"


# What may stand in YAML and in messages: no control characters, no lone surrogates.
PRINTABLE = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs", "Cn", "Co")))
PRINTABLE = PRINTABLE.filter(lambda text: "\ufffe" not in text and "\uffff" not in text)
SIZES = st.integers(1, 2**63 - 1)
WHOLE = st.integers(1, 2**40)

SETTINGS: dict[str, st.SearchStrategy[tuple[str, Any]]] = {
    # path -> the value as written in YAML, and as the program then has it
    "chunk_tokens": WHOLE.map(lambda n: (str(n), n)),
    "model_identity": PRINTABLE.filter(str.strip).map(lambda text: (json.dumps(text), text)),
    "tiers.cpu.capacity": SIZES.map(lambda n: (format_size(n), n)),
    "tiers.cpu.flag": st.booleans().map(lambda flag: (str(flag).lower(), flag)),
    "tiers.cpu.names": st.lists(PRINTABLE).map(lambda names: (json.dumps(names), tuple(names))),
    "connector.note": PRINTABLE.map(lambda text: (json.dumps(text), text)),
    "waive.CPU001": PRINTABLE.filter(str.strip).map(lambda text: (json.dumps(text), text)),
}
SOURCES = st.lists(st.sampled_from(["file", "env", "override"]), unique=True)


@st.composite
def one_key_in_several_sources(draw: st.DrawFn) -> dict[str, dict[str, tuple[str, Any]]]:
    chosen = draw(st.lists(st.sampled_from(sorted(SETTINGS)), min_size=1, unique=True))
    return {path: {s: draw(SETTINGS[path]) for s in draw(SOURCES)} for path in chosen}


@given(values=one_key_in_several_sources())
@settings(max_examples=80, deadline=None)
def test_the_strongest_source_wins_and_is_named(
    file: Path, values: dict[str, dict[str, tuple[str, Any]]]
) -> None:
    in_file = {"tiers.cpu.use": "cpu", "tiers.cpu.capacity": "1MiB"}
    in_file |= {path: by["file"][0] for path, by in values.items() if "file" in by}
    written = document(in_file)
    places = written.values
    file.write_text(written.text, encoding="utf-8")
    variables = {
        "KVFERRY__" + path.upper().replace(".", "__"): by["env"][0]
        for path, by in values.items()
        if "env" in by
    }
    overrides = {f"kvferry.{path}": by["override"][0] for path, by in values.items() if "override" in by}
    defaults = load(None, {}, {"kvferry.tiers.cpu": {"use": "cpu", "capacity": "1MiB"}}).facts()

    facts = load(file, variables, overrides).facts()

    for path, by in values.items():
        if "override" in by:
            expected = (by["override"][1], "kv_connector_extra_config")
        elif "env" in by:
            name = "KVFERRY__" + path.upper().replace(".", "__")
            expected = (by["env"][1], f"env {name}")
        elif path in in_file:
            value = by["file"][1] if "file" in by else 2**20
            expected = (value, f"{file}:{places[path]}")
        elif path in defaults:
            expected = (defaults[path].value, "default")
        else:
            assert path not in facts
            continue
        assert (facts[path].value, facts[path].origin) == expected


@st.composite
def written_options(draw: st.DrawFn) -> dict[str, Any]:
    """Own keys of a section in JSON's types, text as it is meant."""
    every: dict[str, st.SearchStrategy[Any]] = {
        "flag": st.booleans(),
        "ratio": st.floats(allow_nan=False, allow_infinity=False),
        "wait": st.floats(1e-9, 1e9).map(lambda seconds: f"{seconds:.12f}s"),
        "names": st.lists(PRINTABLE),
        "sizes": st.lists(SIZES.map(format_size)),
        "labels": st.dictionaries(PRINTABLE, st.none() | PRINTABLE),
        "note": st.none() | PRINTABLE,
        "level": st.integers(0, 2**63 - 1),
    }
    return {key: draw(every[key]) for key in draw(st.sets(st.sampled_from(sorted(every))))}


@st.composite
def whole_configurations(draw: st.DrawFn) -> dict[str, Any]:
    names = draw(st.lists(st.from_regex(r"[a-z0-9]{1,8}", fullmatch=True), unique=True, max_size=3))
    tiers = {
        name: {
            "use": draw(PRINTABLE),
            "capacity": format_size(draw(SIZES)),
            "eviction": draw(PRINTABLE | PRINTABLE.map(lambda use: {"use": use})),
            **draw(written_options()),
        }
        for name in names
    }
    plugins = st.lists(
        st.from_regex(r"[a-z]{1,5}(@[a-z]{1,5})?", fullmatch=True)
        | st.builds(
            lambda name, word: {"name": name, "on_error": word},
            st.from_regex(r"[a-z]{1,5}", fullmatch=True),
            st.sampled_from(["skip", "fail"]),
        )
    )
    return {
        "plugins": draw(plugins),
        "chunk_tokens": draw(WHOLE),
        "tiers": tiers,
        "connector": draw(written_options()),
        "channel": {"use": draw(PRINTABLE), **draw(written_options())},
        "lookup": {"use": draw(PRINTABLE)},
        "staging": {"use": draw(PRINTABLE), "capacity": format_size(draw(SIZES)), **draw(written_options())},
    }


def quoted(value: Any) -> Any:
    """For overrides, whose text is read by YAML's rules: every text in quotes."""
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, list):
        return [quoted(item) for item in value]
    if isinstance(value, dict):
        return {key: quoted(item) for key, item in value.items()}
    return value


@given(data=whole_configurations())
@settings(max_examples=40, deadline=None)
def test_file_variables_overrides_and_what_is_shown_mean_the_same(file: Path, data: dict[str, Any]) -> None:
    # JSON is YAML, so this is a file too.
    file.write_text(json.dumps(data, ensure_ascii=False), encoding="utf-8")

    from_file = load(file)
    # A key that JSON's escapes make longer than 1,024 letters is none for YAML.
    variables = {
        f"KVFERRY__{key.upper()}": json.dumps(value, ensure_ascii=False) for key, value in data.items()
    }
    from_variables = load(None, variables)
    from_overrides = load(None, None, {"kvferry": quoted(data)})

    assert from_file == from_variables == from_overrides
    assert {leaf.origin for leaf in from_overrides.leaves} <= {"default", "kv_connector_extra_config"}

    shown: dict[str, Any] = {}
    for row in config_data(from_file):
        *parents, key = row["path"]
        inner = shown
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[key] = row["value"]
    plugins = shown["plugins"]
    shown["plugins"] = list(plugins.values()) if isinstance(plugins, dict) else plugins
    assert load(None, None, {"kvferry": quoted(shown)}) == from_file


@given(text=PRINTABLE, names=st.lists(PRINTABLE))
@example(text="a: b", names=["no", "- x", "12:30", "1", "null", "true", "0x1", "", "a #b", "***"])
@settings(max_examples=80, deadline=None)
def test_a_shown_value_can_be_pasted_back(text: str, names: list[str]) -> None:
    config = load(
        None, None, {"kvferry.connector.note": quoted(text), "kvferry.connector.names": quoted(names)}
    )

    lines = config_text(config).splitlines()
    pasted = {}
    for line in lines:
        path, rest = line.split(None, 1)
        if path in ("connector.note", "connector.names"):
            pasted["KVFERRY__" + path.upper().replace(".", "__")] = rest.rsplit(None, 1)[0].strip()

    assert load(None, pasted) == config


PIECES = (
    *"abc:-?|>[]{},#\"'!@`~\\%<*& \n\t\ufeff\u2028\x85\x00",
    *("%YAML 9.9", "---", "...", "<<", "!!", "\\U00110000", "\\ud800", "\n  ", "null", ".nan", "0x1"),
    *("plugins: ", "tiers: ", "cpu: ", "use: ", "capacity: ", "1GiB", "eviction: ", "waive: "),
)
FRAGMENTS = st.lists(st.sampled_from(PIECES), max_size=25).map("".join)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | FRAGMENTS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["use", "capacity", "cpu", "tiers", "a.b", ""]), inner)
    ),
    max_leaves=8,
)
NAMES = st.lists(
    st.sampled_from(["tiers", "cpu", "capacity", "eviction", "plugins", "waive", "A", "", "_", "0"])
)


@given(
    raw=st.binary() | FRAGMENTS.map(str.encode) | st.text().map(lambda t: t.encode("utf-8", "replace")),
    variables=st.dictionaries(
        NAMES.map(lambda parts: "KVFERRY__" + "__".join(parts)), FRAGMENTS | st.text(), max_size=3
    ),
    overrides=st.dictionaries(
        NAMES.map(lambda parts: ".".join(["kvferry", *parts])) | st.text(), JSON, max_size=3
    ),
)
@settings(max_examples=250, deadline=None)
def test_nothing_but_our_own_errors_comes_out(
    file: Path, raw: bytes, variables: dict[str, str], overrides: dict[str, Any]
) -> None:
    file.write_bytes(raw)
    before = json.dumps(overrides)
    try:
        config = load(file, variables, overrides)
    except KVFerryError as error:
        report = str(error)
        report.encode()
        assert all(part.isprintable() for part in report.splitlines())
    else:
        config_text(config).encode()
        json.dumps(config_data(config))
    assert json.dumps(overrides) == before

    try:
        find_config(variables, overrides)
    except KVFerryError as error:
        str(error).encode()


KEYS = (
    *("plugins", "chunk_tokens", "instance", "model_identity", "runtime_dir", "tiers", "connector", "waive"),
    *("channel", "channel.use", "channel.labels", "lookup", "lookup.ratio"),
    *("p2p.delay", "p2p.land_on", "p2p.buffer", "staging", "staging.capacity", "staging.labels"),
    *("tiers.cpu.capacity", "tiers.cpu.eviction", "tiers.cpu.flag", "tiers.cpu.ratio", "tiers.cpu.names"),
    *("tiers.cpu.eviction.use", "connector.level", "connector.note", "connector.labels"),
)
"""At every depth, of core and of plugins; longer than two letters, so that one slip leaves a likeness."""


@given(
    path=st.sampled_from(KEYS),
    source=st.sampled_from(["file", "env", "override"]),
    at=st.integers(0, 20),
    letter=st.sampled_from("abxyz"),
)
def test_a_key_misspelt_by_one_letter_is_refused_with_the_right_one(
    file: Path, path: str, source: str, at: int, letter: str
) -> None:
    *parents, key = path.split(".")
    at %= len(key)
    wrong = ".".join([*parents, key[:at] + letter + key[at + 1 :]])
    assume(wrong != path)
    written = {"tiers.cpu.use": "cpu", "tiers.cpu.capacity": "1GiB"}
    if source == "file":
        written[wrong] = "1"
    made = document(written)
    file.write_text(made.text, encoding="utf-8")
    variable = "KVFERRY__" + wrong.upper().replace(".", "__")

    with pytest.raises(KVFerryErrors) as caught:
        load(
            file,
            {variable: "1"} if source == "env" else {},
            {f"kvferry.{wrong}": 1} if source == "override" else {},
        )

    (error,) = caught.value.errors
    assert error.what == f"{wrong}: unknown key"
    places = {
        "file": (f"{file}:{made.keys.get(wrong)}", repr(key)),
        "env": (f"env {variable}", "KVFERRY__" + path.upper().replace(".", "__")),
        "override": ("kv_connector_extra_config", f"'kvferry.{path}'"),
    }
    where, meant = places[source]
    assert error.where == where
    assert error.remedy == f"did you mean {meant}?"
