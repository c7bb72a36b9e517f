"""The canonical encoding behind namespaces and chain roots."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.api import GroupGeometry, KVGeometry
from kvferry.control.canonical import encode

# Small alphabets, so that equal and nearly equal values are common.
leaves = st.one_of(
    st.none(),
    st.integers(-3, 12),
    st.integers(),
    st.text("a1ns\0é\ud800", max_size=4),
    st.binary(max_size=4),
)
values = st.recursive(leaves, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=8)


def typed(value: Any) -> Any:
    """Equality that keeps types apart, as the encoding must."""
    if isinstance(value, tuple):
        return ("tuple", *(typed(item) for item in value))
    return (type(value).__name__, value)


@given(st.lists(values, max_size=20))
def test_two_values_share_a_form_only_when_they_are_equal(many: list[Any]) -> None:
    forms = {encode(value) for value in many}
    assert len(forms) == len({typed(value) for value in many})


@given(values, values)
def test_no_form_is_the_beginning_of_another(one: Any, other: Any) -> None:
    if typed(one) != typed(other):
        assert not encode(other).startswith(encode(one))


@given(values, values, values)
def test_moving_a_border_between_fields_changes_the_form(a: Any, b: Any, c: Any) -> None:
    assert encode((a, (b, c))) != encode(((a, b), c))
    assert encode((a, b)) != encode((a, b, None))


def test_every_small_value_has_a_form_that_begins_no_other() -> None:
    # Exhaustive where mistakes live: letters that are also tags, digits, empty values, pairs.
    leaves = [None, 0, 1, 10, -1, "", "0", "1", "a", "n", "s", "as", "sa", b"", b"a", b"s", b"sa"]
    flat = [(), *((a,) for a in leaves), *((a, b) for a in leaves for b in leaves)]
    nested = [(a, (b,)) for a in leaves for b in leaves] + [((a,), b) for a in leaves for b in leaves]
    forms = sorted(encode(value) for value in [*leaves, *flat, *nested])
    # In sorted order a beginning stands right before one of its continuations.
    for one, other in pairwise(forms):
        assert not other.startswith(one)


def test_lists_and_tuples_are_the_same_sequence() -> None:
    assert encode([1, "a"]) == encode((1, "a"))


def test_every_field_of_the_geometry_takes_part() -> None:
    group = GroupGeometry(kind="full", layers=2, kv_heads=3, head_size=4, dtype="float16")
    geometry = KVGeometry(groups=(group,), chunk_tokens=256)
    forms = {encode(geometry)}
    changes: dict[str, Any] = {
        "kind": "mla",
        "layers": 5,
        "kv_heads": 5,
        "head_size": 5,
        "dtype": "float8_e4m3fn",
        "window": 64,
    }
    assert set(changes) == {field.name for field in attrs.fields(GroupGeometry)}
    for name, value in changes.items():
        changed = attrs.evolve(group, **{name: value})
        forms.add(encode(attrs.evolve(geometry, groups=(changed,))))
    forms.add(encode(attrs.evolve(geometry, groups=(group, group))))
    forms.add(encode(attrs.evolve(geometry, chunk_tokens=128)))
    assert len(forms) == 1 + len(changes) + 2
    assert {field.name for field in attrs.fields(KVGeometry)} == {"groups", "chunk_tokens"}


@pytest.mark.parametrize("value", [True, 1.0, {"a": 1}, {1}, object(), bytearray(b"a")])
def test_values_without_one_clear_form_are_refused(value: object) -> None:
    with pytest.raises(TypeError, match="no canonical encoding"):
        encode(("model", value))
