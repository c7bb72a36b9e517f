"""Files that describe another host: strict, with places, and read back as they were written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.api import Fact, FactKind, FactSource, FactSpec
from kvferry.compat import FactCatalogue, OwnedFactSpec
from kvferry.compat.core_facts import CORE_FACTS
from kvferry.compat.facts_file import HostDescription, description_text, read_description
from kvferry.compat.keys import core_keys

MORE = (
    FactSpec(path="zoo.patience", kind=FactKind.DURATION, meaning="patience", source=FactSource.HOST),
    FactSpec(path="zoo.count", kind=FactKind.COUNT, meaning="count", source=FactSource.HOST),
    FactSpec(path="zoo.ratio", kind=FactKind.NUMBER, meaning="ratio", source=FactSource.HOST),
    FactSpec(path="zoo.names", kind=FactKind.TEXTS, meaning="names", source=FactSource.HOST),
)
CATALOGUE = FactCatalogue(
    OwnedFactSpec(spec=spec, owner="core")
    for spec in (*CORE_FACTS, *MORE, *(key.as_fact() for key in core_keys()))
)


def read(folder: Path, text: str | bytes) -> HostDescription:
    path = folder / "f.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_description(path, CATALOGUE)


def values(found: HostDescription) -> dict[str, object]:
    assert found.faults == ()
    return {path: fact.value for path, fact in found.facts.items()}


def test_dots_and_nesting_say_the_same_and_every_fact_keeps_its_place(tmp_path: Path) -> None:
    text = "host.memory_bytes: 512GiB\nengine:\n  workers: 8\n  group_kinds: [full, full]\n"
    found = read(tmp_path, text)
    assert values(found) == {
        "host.memory_bytes": 512 << 30,
        "engine.workers": 8,
        "engine.group_kinds": ("full", "full"),
    }
    assert found.facts["host.memory_bytes"].origin.endswith("f.yaml:1:20")
    assert found.facts["engine.workers"].origin.endswith("f.yaml:3:12")


def test_json_is_read_too(tmp_path: Path) -> None:
    data = {"host": {"memory_bytes": "1TiB"}, "native.available": True, "zoo.ratio": 0.5}
    assert values(read(tmp_path, json.dumps(data, indent=2))) == {
        "host.memory_bytes": 1 << 40,
        "native.available": True,
        "zoo.ratio": 0.5,
    }


@pytest.mark.parametrize(
    ("text", "place", "fault"),
    [
        ("host.memory_bytes: 512\n", "1:20", "expected a size with a unit, not the number 512"),
        ("host.memory_bytes: 512gb\n", "1:20", "did you mean 'GB'"),
        ("engine.workers: 2.5\n", "1:17", "expected a whole number"),
        ('engine.workers: "2"\n', "1:17", "expected a whole number"),
        ("engine.workers: -2\n", "1:17", "must be at least 1"),
        ("engine: {workers: 0}\n", "1:19", "must be at least 1"),
        ("engine.block_tokens: 0\n", "1:22", "must be at least 1"),
        ("engine.chunk_bytes: 0B\n", "1:21", "must be at least 1B"),
        ("zoo.count: -1\n", "1:12", "must not be negative"),
        ("# host.cpus: 1\n\n", "1:1", "the facts file is empty"),
        ("native.available: yes\n", "1:19", "expected true or false"),
        ("engine.device: null\n", "1:16", "expected text"),
        ("engine.group_kinds: full\n", "1:21", "expected a list"),
        ("host.memory_bytes: {a: 1GiB}\nhost.cpus: x\n", "2:12", "expected a whole number"),
        ("host.cpus: 2\nhost: {cpus: 3}\n", "2:8", "given twice, first at"),
        ("host.cpus: 2\nhost.cpus: 3\n", "2:1", "duplicate key"),
        ("tiers.cpu.capacity: 3GiB\n", "1:1", "comes from the configuration, not from the host"),
        (
            "tiers: {cpu: {capabilities: {shared: true}}}\n",
            "1:30",
            "comes from the plugin, not from the host",
        ),
        ("chunk_tokens: 256\n", "1:1", "comes from the configuration"),
        ("a: [1\n", "1:4", "not valid YAML"),
        ("- host.cpus\n", "1:1", "expected a mapping of facts"),
        ("", "1:1", "the facts file is empty"),
        (b"\xff\xfe", "", "the facts file is not UTF-8"),
        (b"#" * (300 << 10), "", "the facts file is too large"),
    ],
)
def test_a_wrong_file_is_refused_with_the_place(
    tmp_path: Path, text: str | bytes, place: str, fault: str
) -> None:
    found = read(tmp_path, text)
    assert any(fault in str(each) for each in found.faults), found.faults
    (told,) = (each for each in found.faults if fault in str(each))
    assert told.where == f"{tmp_path}/f.yaml" + (f":{place}" if place else "")


def test_all_faults_come_at_once_from_top_to_bottom(tmp_path: Path) -> None:
    found = read(tmp_path, "engine.workers: x\nhost.cpus: y\nhost.memory_bytes: z\n")
    assert [fault.where.rpartition("f.yaml:")[2] for fault in found.faults] == ["1:17", "2:12", "3:20"]


def test_a_file_that_is_not_there_is_a_fault(tmp_path: Path) -> None:
    (fault,) = read_description(tmp_path / "absent.yaml", CATALOGUE).faults
    assert "the facts file cannot be read" in str(fault)
    assert fault.remedy


def test_an_empty_file_is_told_what_a_facts_file_holds(tmp_path: Path) -> None:
    (fault,) = read(tmp_path, "").faults
    assert "host.memory_bytes: 512GiB" in fault.remedy
    assert "kvferry doctor --format facts" in fault.remedy


def test_a_name_that_has_only_its_section_in_common_is_no_suggestion(tmp_path: Path) -> None:
    (warning,) = read(tmp_path, "engine.tp: 8\n").warnings
    assert "did you mean" not in warning.remedy
    assert "engine.workers" in warning.remedy


@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("host.memory", "host.memory_bytes"),
        ("engine.worker", "engine.workers"),
        ("ENGINE.DEVICE", "engine.device"),
        ("entirely.else", ""),
    ],
)
def test_an_unknown_fact_is_a_warning_with_the_nearest_name(tmp_path: Path, path: str, near: str) -> None:
    found = read(tmp_path, f"host.cpus: 2\n{path}: 1\n")
    assert values(found) == {"host.cpus": 2}
    (warning,) = found.warnings
    assert warning.where.endswith("f.yaml:2:1")
    assert (f"did you mean {near!r}?" in warning.remedy) is bool(near)


VALUES = {
    FactKind.SIZE: st.integers(0, 1 << 60),
    FactKind.DURATION: st.integers(0, 10**6).map(lambda milliseconds: milliseconds / 1000),
    FactKind.COUNT: st.integers(0, 1 << 40),
    FactKind.NUMBER: st.floats(-1e9, 1e9),
    FactKind.FLAG: st.booleans(),
    FactKind.TEXT: st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]) | st.just(" ")),
    FactKind.TEXTS: st.lists(st.text(st.characters(codec="ascii", categories=["L", "N"]))).map(tuple),
}
HOST_SPECS = [spec for spec in (*CORE_FACTS, *MORE) if spec.source is FactSource.HOST]


@given(st.data())
def test_what_one_machine_writes_another_reads(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    chosen = data.draw(st.lists(st.sampled_from(HOST_SPECS), unique_by=lambda spec: spec.path))
    facts = {spec.path: data.draw(VALUES[spec.kind]) for spec in chosen}
    for spec in chosen:
        if spec.at_least is not None:
            facts[spec.path] = max(facts[spec.path], int(spec.at_least))
    given_facts = {path: Fact(path=path, value=value, origin="probe") for path, value in facts.items()}
    # What is no fact about the host stays where it is.
    given_facts["chunk_tokens"] = Fact(path="chunk_tokens", value=256, origin="default")
    text = description_text(given_facts, CATALOGUE)
    if facts:
        found = read(tmp_path_factory.mktemp("facts"), text)
        assert values(found) == facts
        assert found.warnings == ()
    for line in text.splitlines():
        assert not line.startswith("chunk_tokens")


def test_the_remarks_about_the_engine_can_be_used_as_they_are(tmp_path: Path) -> None:
    text = description_text({}, CATALOGUE).replace("# engine.", "engine.")
    found = read(tmp_path, text)
    assert set(values(found)) == {spec.path for spec in CORE_FACTS if spec.source is FactSource.ENGINE}
