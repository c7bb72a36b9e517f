"""Paths with wildcards and conditions, against plain Python over nested dictionaries."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.api import Fact
from kvferry.compat.views import FactView, bound_text, looked_at, plain_path

names = st.sampled_from(["a", "b-2", "c_3"])
tiers = st.dictionaries(
    names,
    st.fixed_dictionaries(
        {"use": st.just("x")}, optional={"size": st.integers(0, 9), "fast": st.booleans() | st.none()}
    ),
    max_size=3,
)
fleets = st.dictionaries(names, st.tuples(st.integers(1, 4), tiers), min_size=1, max_size=3)


def facts_of(fleet: dict[str, tuple[int, dict[str, dict[str, Any]]]]) -> dict[str, Fact]:
    values: dict[str, Any] = {}
    for instance, (workers, inside) in fleet.items():
        values[f"instances.{instance}.workers"] = workers
        for tier, keys in inside.items():
            for key, value in keys.items():
                values[f"instances.{instance}.tiers.{tier}.{key}"] = value
    return {path: Fact(path=path, value=value, origin=f"at {path}") for path, value in values.items()}


@given(fleets)
def test_wildcards_nest_in_the_order_of_names(
    fleet: dict[str, tuple[int, dict[str, dict[str, Any]]]],
) -> None:
    view = FactView(facts_of(fleet))
    inner = {name: dict(sorted(inside.items())) for name, (_, inside) in sorted(fleet.items())}
    everything = [tier for inside in inner.values() for tier in inside.values()]
    found = view.get("instances.*.tiers.*.size")
    if all("size" in tier for tier in everything):
        assert found is not None
        assert found.value == tuple(tuple(t["size"] for t in inside.values()) for inside in inner.values())
    else:
        assert found is None
    assert view["instances.*.workers"].value == tuple(fleet[name][0] for name in sorted(fleet))


@given(fleets)
def test_a_condition_takes_those_of_which_it_is_known_and_true(
    fleet: dict[str, tuple[int, dict[str, dict[str, Any]]]],
) -> None:
    view = FactView(facts_of(fleet))
    taken = [
        f"instances.{name}.tiers.{tier}.use"
        for name, (_, inside) in sorted(fleet.items())
        for tier, keys in sorted(inside.items())
        if keys.get("fast") is True
    ]
    path = "instances.*.tiers.*[fast].use"
    value = view[path].value
    assert len(value) == len(fleet)
    assert sum(len(each) for each in value) == len(taken)
    if taken:
        assert view.concrete(path) == tuple(taken)
        assert view[path].origin == ", ".join(f"at {each}" for each in taken)


def test_every_condition_has_to_hold() -> None:
    fleet: dict[str, Any] = {
        "a": (1, {"b-2": {"fast": True, "size": 0}, "c_3": {"fast": True, "size": 5}, "a": {"size": 7}})
    }
    view = FactView(facts_of(fleet), {"one": "instances.a"})
    assert view["one.tiers.*[fast][size].size"].value == (5,)
    assert view["one.workers"].value == 1


@pytest.mark.parametrize(
    ("text", "bindings", "expected"),
    [
        ("tiers.*.a <= b", {"tiers.*": "tiers.cpu"}, "tiers.cpu.a <= b"),
        ("tiers.*[fast].a", {"tiers.*": "tiers.cpu"}, "tiers.*[fast].a"),
        ("some tiers.* and", {"tiers.*": "tiers.cpu"}, "some tiers.cpu and"),
        ("one.a == other.b", {"one": "i.x", "other": "i.y"}, "i.x.a == i.y.b"),
        ("one of one.a, not the other", {"one": "i.x", "other": "i.y"}, "one of i.x.a, not the other"),
        ("everyone.a and host.one.b", {"one": "i.x"}, "everyone.a and host.one.b"),
    ],
)
def test_formulas_read_as_they_are_bound(text: str, bindings: dict[str, str], expected: str) -> None:
    assert bound_text(text, bindings) == expected


def test_a_reader_sees_paths_without_conditions_and_what_the_conditions_look_at() -> None:
    path = "one.tiers.*[capabilities.persistent][path].path"
    assert plain_path(path) == "one.tiers.*.path"
    assert looked_at(path) == ("one.tiers.*.path", "one.tiers.*.capabilities.persistent")


@pytest.mark.parametrize(
    ("path", "bindings", "names"),
    [
        ("tiers.*.use", {}, ("cpu", "far")),
        ("tiers.*[fast].use", {}, ("cpu",)),
        ("tiers.*.use", {"tiers.*": "tiers.far"}, ("far",)),
        ("one.tiers.*.use", {"one": "instances.a"}, ("x",)),
        ("instances.*.tiers.*.use", {}, ("a",)),
        ("devices.*.name", {}, ()),
        ("chunk_tokens", {}, ()),
    ],
)
def test_members_are_told_by_name(path: str, bindings: dict[str, str], names: tuple[str, ...]) -> None:
    values = {
        "chunk_tokens": 256,
        "tiers.cpu.use": "cpu",
        "tiers.cpu.fast": True,
        "tiers.far.use": "cpu",
        "instances.a.tiers.x.use": "cpu",
    }
    facts = {each: Fact(path=each, value=value, origin="test") for each, value in values.items()}
    assert FactView(facts, bindings).member_names(path) == names
