"""Bad and odd configurations with the exact text that a user gets to read: see ``corpus.txt``."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from pathlib import Path
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

from .corpus import CORPUS, Case, read_corpus


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


def load(case: Case) -> Config:
    file = None
    if case.file is not None:
        file = Path("config.yaml")
        file.write_bytes(case.file)
    sources = ConfigSources(file=file, environment=case.variables, overrides=case.overrides)
    return read_core(sources).structure(resolve)


def faults(case: Case) -> list[str]:
    with pytest.raises(KVFerryErrors) as caught:
        load(case)
    assert all(error.retry is Retry.AFTER_CHANGE for error in caught.value.errors)
    return [str(error) for error in caught.value.errors]


@pytest.fixture(autouse=True)
def _in_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


CASES = read_corpus(CORPUS.read_text(encoding="utf-8"))


def by_name(cases: list[Case]) -> dict[str, Case]:
    named = {case.name: case for case in cases}
    assert len(named) == len(cases), "two cases have one name"
    return named


BAD = by_name([case for case in CASES if case.faults])
GOOD = by_name([case for case in CASES if case.values])


@pytest.mark.parametrize("name", BAD)
def test_a_bad_input_is_explained_with_every_fault_in_one_report(name: str) -> None:
    assert faults(BAD[name]) == BAD[name].faults


@pytest.mark.parametrize("name", GOOD)
def test_an_odd_but_good_value_is_read_as_meant(name: str) -> None:
    facts = load(GOOD[name]).facts()
    for line in GOOD[name].values:
        path, _, rest = line.partition(" = ")
        value, _, origin = rest.partition("  ")
        fact = facts[path]
        assert f"{path} = {fact.value!r}" == f"{path} = {value}"
        if origin:
            assert f"({fact.origin})" == origin


@pytest.mark.parametrize("name", BAD)
def test_a_report_says_where_and_what_to_do(name: str) -> None:
    """Only the sentence of a plugin's validator, which says what the value must be, may stand without a
    remedy."""
    for fault in faults(BAD[name]):
        head = fault.splitlines()[0]
        assert head.startswith(("config.yaml:", "env KV", "env kvferry", "kv_connector_extra_config: "))
        assert "\n  fix  " in fault or "' must be " in head, fault


def test_a_value_that_json_does_not_have_is_explained() -> None:
    case = Case(name="object", overrides={"kvferry.instance": object(), "kvferry.chunk_tokens": 10**5000})
    assert faults(case) == [
        "kv_connector_extra_config: chunk_tokens: the value is a whole number beyond 64 bits\n"
        "  fix  write a smaller number",
        "kv_connector_extra_config: instance: a value of type object cannot be configured\n"
        "  fix  write text, a number, true, false, a list or a mapping",
    ]


def test_an_override_that_holds_itself_is_explained() -> None:
    endless: dict[str, Any] = {}
    endless["tiers"] = endless

    found = faults(Case(name="endless", overrides={"kvferry": endless}))

    assert any("nested deeper than 32 levels\n  fix  " in fault for fault in found)


def test_faults_of_all_sources_come_in_one_run_and_in_order() -> None:
    found = faults(
        Case(
            name="all",
            file=b"chunk_tokens: x\ntiers: 1\n",
            variables={"KVFERRY__INSTANCE": "a b"},
            overrides={"kvferry.waive": {"CPU001": ""}},
        )
    )

    assert [line.partition(": ")[0] for line in found] == [
        "config.yaml:1:15",
        "config.yaml:2:8",
        "env KVFERRY__INSTANCE",
        "kv_connector_extra_config",
    ]


def test_an_unreadable_file_does_not_hide_the_other_sources_nor_invent_faults() -> None:
    found = faults(
        Case(
            name="unreadable",
            file=b"tiers: [\n",
            variables={"KVFERRY__TIERS__CPU__CAPACITY": "1GiB", "KVFERRY__INSTANC": "a"},
        )
    )

    # The tier's `use` stands in the file, so it must not be called missing.
    assert [line.splitlines()[0] for line in found] == [
        "config.yaml:2:1: not valid YAML: expected the node content, but found the end of the text",
        "env KVFERRY__INSTANC: instanc: unknown key",
    ]
