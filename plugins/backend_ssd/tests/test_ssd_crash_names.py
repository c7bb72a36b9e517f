"""Whatever an instance, a model, a salt or a folder is called: files stay inside, short, and apart."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from attrs import evolve
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from kvferry.api import ChunkHeader, KVFerryError
from kvferry.testing.conformance.driver import value_of
from kvferry_backend_ssd.names import is_store_file, set_folder, store_file
from kvferry_backend_ssd.options import IOPath, SSDOptions
from plugins.backend_ssd.tests.ssd_crash import Rig, chunk

TEXTS = st.one_of(
    st.text(st.characters(), max_size=30),  # with surrogates, which no file system takes
    st.text("aA./\\\x00 -_~:*é\u0301\U0001f600", max_size=12),
    st.sampled_from(
        (
            *("", ".", "..", "../../etc/passwd", "/", "//", "a/b", "a\\b", "\x00", "CON", "-rf", "~root"),
            *("x" * 5000, "é" * 300, "instance", "Instance", "a-rank0", "meta-llama/Llama-3.1-8B", "\ud800"),
        )
    ),
)
RANKS = st.integers(0, 1 << 20)
NAMES = st.tuples(TEXTS, RANKS)


def short_and_plain(name: str) -> bool:
    """Whether every file system takes it as the name of one file, and tells it from any other such."""
    return name.isascii() and name.isprintable() and not set(name) & set('/\\:*?"<>| ') and len(name) < 255


@given(NAMES, NAMES)
@example(("a", 0), ("A", 0))
@example(("a-rank1", 1), ("a", 11))
@example(("é", 0), ("e\u0301", 0))
@example(("x" * 5000, 0), ("x" * 5000 + "y", 0))
def test_two_names_never_share_a_folder_and_each_is_one_short_component(
    one: tuple[str, int], other: tuple[str, int]
) -> None:
    for name in (set_folder(*one), set_folder(*other)):
        assert short_and_plain(name)
        assert name.strip(".")
        assert not name.startswith("-")
    assert set_folder(*one) == set_folder(*one)
    if one != other:
        assert set_folder(*one).casefold() != set_folder(*other).casefold()


@given(
    st.tuples(st.binary(max_size=64), st.integers(1, 1 << 40)),
    st.tuples(st.binary(), st.integers(1, 1 << 40)),
)
def test_two_layouts_never_share_a_file(one: tuple[bytes, int], other: tuple[bytes, int]) -> None:
    assert short_and_plain(store_file(*one))
    assert is_store_file(store_file(*one))
    if one != other:
        assert store_file(*one).casefold() != store_file(*other).casefold()


@pytest.fixture
def rig(quick_folder: Path) -> Rig:
    return Rig(path=quick_folder / "inside" / "store", io=IOPath.THREADS, slots=2)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(TEXTS, TEXTS, TEXTS, TEXTS)
def test_instances_of_any_two_names_work_side_by_side_and_never_meet(
    rig: Rig, one: str, other: str, owner: str, model: str
) -> None:
    """Same key, different bytes: each finds its own, and all that was made lies below the path."""
    assume(one != other)
    with tempfile.TemporaryDirectory(dir=rig.path.parents[1]) as outside:
        root = Path(outside) / "inside"
        root.mkdir()
        rigs = [evolve(rig, path=root / "store", facts={"instance": name}) for name in (one, other)]
        header = evolve(chunk(1)[0], owner=owner, model=model)
        values = [value_of(header.key, header.size, edition) for edition in (1, 2)]
        drivers = [each.open() for each in rigs]
        try:
            for driver, value in zip(drivers, values, strict=True):
                driver.store([(header, value)])
        finally:
            for driver in drivers:
                driver.close()
        for each, value in zip(rigs, values, strict=True):
            driver = each.open()
            try:
                assert [_plain(found) for found in driver.recovered] == [_plain(header)]
                driver.expect([(header, value)])
            finally:
                driver.close()
        assert os.listdir(outside) == ["inside"]
        assert os.listdir(root) == ["store"]
        for path in _below(root / "store"):
            assert short_and_plain(path.name), path.name
            assert path.resolve().is_relative_to(root.resolve())


def _plain(header: ChunkHeader) -> bytes:
    """Surrogates make headers that cannot be shown when they differ."""
    return header.to_bytes()


def _below(path: Path) -> Iterator[Path]:
    found = list(path.rglob("*"))
    assert len([each for each in found if each.is_dir()]) == 2
    yield from found


@pytest.mark.parametrize(
    "name", ["with space", "ünïcode-é\u0301", "-rf", "a'b\"c", "line\nbreak", "\udc80bytes"]
)
def test_a_path_of_any_characters_is_used_as_it_is(quick_folder: Path, name: str) -> None:
    rig = Rig(path=quick_folder / name, io=IOPath.THREADS)
    driver = rig.open()
    driver.store([chunk(1)])
    driver.close()
    assert os.listdir(quick_folder) == [name]
    again = rig.open()
    again.expect([chunk(1)])
    again.close()


@pytest.mark.parametrize("name", ["x" * 300, "y/" * 3000])
def test_a_path_that_no_folder_can_have_is_refused_with_its_reason(quick_folder: Path, name: str) -> None:
    rig = Rig(path=quick_folder / name, io=IOPath.THREADS)
    with pytest.raises(KVFerryError) as caught:
        rig.open()
    assert caught.value.why
    assert caught.value.remedy
    assert os.listdir(quick_folder) == []


@pytest.mark.parametrize("path", ["", "  ", "a\x00b", "a\ud800b"])
def test_a_path_that_is_no_path_is_no_option(path: str) -> None:
    with pytest.raises(ValueError):
        SSDOptions(path=path)
