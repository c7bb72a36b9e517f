"""Which tier is the first, and which keys do nothing there, as rules read it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from attrs import frozen
from hypothesis import given
from hypothesis import strategies as st

from kvferry.api import BackendSpec, Fact
from kvferry.compat.keys import core_keys
from kvferry.config import Config, ConfigSources, StoreWhen, read_core
from kvferry.config.places import FIRST_TIER_KEYS, LOWER_TIER_KEYS

WORDS: dict[str, str | float] = {
    "store": "write_on_evict",
    "in_flight": "1GiB",
    "load_deadline": "1s",
    "store_deadline": "1min",
    "min_load_tokens": 512,
    "retry_after": "5s",
    "max_pinned": 0.25,
}


@frozen
class Options:
    pass


def load(text: str, folder: Path, *, environment: dict[str, str] | None = None, **overrides: Any) -> Config:
    file = folder / "config.yaml"
    file.write_text(text, encoding="utf-8")
    given = {path.replace("__", "."): value for path, value in overrides.items()}
    sources = ConfigSources(file=file, environment=environment or {}, overrides=given)
    return read_core(sources).structure(lambda s: Options if s.spec is BackendSpec else None)


def places(facts: dict[str, Fact], name: str) -> dict[str, Any]:
    return {path.split(".")[1]: fact.value for path, fact in facts.items() if path.endswith(f".place.{name}")}


TIERS = st.dictionaries(
    st.sampled_from(["a", "b", "m-1", "z_9", "cpu"]),
    st.lists(st.sampled_from(sorted(WORDS)), unique=True),
    min_size=1,
    max_size=4,
)


@given(TIERS)
def test_the_first_of_the_file_is_the_first_whatever_the_names(
    tmp_path_factory: pytest.TempPathFactory, tiers: dict[str, list[str]]
) -> None:
    sections = {
        name: {"use": "x", "capacity": "1GiB", **{key: WORDS[key] for key in keys}}
        for name, keys in tiers.items()
    }
    text = yaml.safe_dump({"tiers": sections}, sort_keys=False)
    config = load(text, tmp_path_factory.mktemp("places"))
    facts = dict(config.facts())
    first = next(iter(tiers))

    assert list(config.tiers) == list(tiers)
    assert places(facts, "front") == {name: name == first for name in tiers}
    assert {name: set(keys) for name, keys in places(facts, "idle_keys").items()} == {
        name: set(tiers[name]) & set(LOWER_TIER_KEYS if name == first else FIRST_TIER_KEYS) for name in tiers
    }


def test_a_key_that_says_the_default_is_set_all_the_same(tmp_path: Path) -> None:
    config = load("tiers: {a: {use: x, capacity: 1GiB, store: write_through}}", tmp_path)

    idle = config.facts()["tiers.a.place.idle_keys"]
    assert config.tiers["a"].store is StoreWhen.WRITE_THROUGH  # type: ignore[index]
    assert idle.value == ("store",)
    assert idle.origin.endswith("config.yaml:1:44")


def test_every_source_of_an_idle_key_is_named(tmp_path: Path) -> None:
    config = load(
        "tiers: {a: {use: x, capacity: 1GiB, retry_after: 1s}}",
        tmp_path,
        environment={"KVFERRY__TIERS__A__IN_FLIGHT": "1GiB"},
        kvferry__tiers__a__store="write_on_evict",
    )

    idle = config.facts()["tiers.a.place.idle_keys"]
    assert idle.value == ("store", "in_flight", "retry_after")
    assert idle.origin.split(", ")[:2] == ["kv_connector_extra_config", "env KVFERRY__TIERS__A__IN_FLIGHT"]


def test_a_tier_that_only_a_variable_names_comes_behind_those_of_the_file(tmp_path: Path) -> None:
    config = load(
        "tiers: {z: {use: x, capacity: 1GiB}}",
        tmp_path,
        environment={"KVFERRY__TIERS__A__USE": "x", "KVFERRY__TIERS__A__CAPACITY": "1GiB"},
    )

    facts = config.facts()
    assert places(dict(facts), "front") == {"z": True, "a": False}
    assert facts["tiers.z.place.front"].origin.endswith("config.yaml:1:18")
    assert facts["tiers.a.place.front"].origin == "env KVFERRY__TIERS__A__USE"


def test_without_tiers_there_is_no_place(tmp_path: Path) -> None:
    for text in ("tiers: {}", "chunk_tokens: 16"):
        assert not places(dict(load(text, tmp_path).facts()), "front")


@pytest.mark.parametrize(("word", "keys"), [("lower", LOWER_TIER_KEYS), ("first", FIRST_TIER_KEYS)])
def test_a_key_that_is_not_for_every_tier_says_so(word: str, keys: tuple[str, ...]) -> None:
    said = [key.path for key in core_keys() if key.doc.startswith(f"{word} tier: ")]
    assert said == [f"tiers.*.{key}" for key in keys]


@given(
    staged=st.booleans(),
    shared=st.booleans(),
    delayed=st.booleans(),
    capacity=st.integers(1, 1 << 50),
    buffer=st.integers(1, 1 << 50),
)
def test_sharing_takes_the_arena_that_is_staged_and_the_buffers_that_reads_pass(
    tmp_path_factory: pytest.TempPathFactory,
    staged: bool,
    shared: bool,
    delayed: bool,
    capacity: int,
    buffer: int,
) -> None:
    sections: dict[str, dict[str, Any]] = {
        "staging": {"capacity": f"{capacity}B", **({"use": "x"} if staged else {})},
        "p2p": {"buffer": f"{buffer}B", "delay": delayed, **({"use": "x"} if shared else {})},
    }
    config = load(yaml.safe_dump(sections), tmp_path_factory.getbasetemp())

    takes = {p.split(".")[1]: f for p, f in config.facts().items() if p.startswith("sharing.")}
    expected = {"staging": capacity} if staged else {}
    if shared and (staged or delayed):
        expected["landing"] = buffer
    assert {name: fact.value for name, fact in takes.items()} == expected
    # A reader of a report is led to the line that says how much.
    assert all("config.yaml:" in fact.origin for fact in takes.values())
