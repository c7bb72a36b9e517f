"""The two structures beneath the policies, against sorted lists."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry_eviction_policies.columns import Column
from kvferry_eviction_policies.ghosts import Ghosts, fingerprint
from kvferry_eviction_policies.heaps import EMPTY, Heaps
from plugins.eviction_policies.tests.subjects import key

NUMBERS = 24


def calls(work: Callable[[], Any]) -> int:
    """Python functions that ``work`` enters."""
    count = 0

    def note(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


steps = st.lists(
    st.tuples(st.integers(0, NUMBERS - 1), st.integers(0, 1), st.integers(-3, 3), st.integers(0, 2)),
    max_size=120,
)


@given(steps)
def test_two_heaps_in_the_same_columns_are_two_sorted_lists(
    steps: list[tuple[int, int, int, int]],
) -> None:
    first, then = Column(NUMBERS, np.int64), Column(NUMBERS, np.int64)
    heaps = Heaps(NUMBERS, first, then)
    roots = [EMPTY, EMPTY]
    models: list[list[tuple[int, int, int]]] = [[], []]
    for number, which, order, tie in steps:
        held = next((n for n, model in enumerate(models) if any(e[2] == number for e in model)), None)
        if held is None:
            first.view[number], then.view[number] = order, tie
            roots[which] = heaps.add(roots[which], number)
            models[which].append((order, tie, number))
        else:
            roots[held] = heaps.remove(roots[held], number)
            models[held] = [element for element in models[held] if element[2] != number]
        for root, model in zip(roots, models, strict=True):
            assert root - 1 == (min(model)[2] if model else -1)
    for root, model in zip(roots, models, strict=True):
        for element in sorted(model):
            assert root - 1 == element[2]
            root = heaps.remove(root, element[2])
        assert root == EMPTY


@pytest.mark.parametrize("factor", [1, -1, 2654435761])
def test_no_operation_on_a_large_heap_takes_long(factor: int) -> None:
    """Whatever came before: rising, falling or mixed, and removal from anywhere."""
    size = 1 << 12
    order = Column(size, np.int64)
    order.array[:] = np.arange(size) * factor % (1 << 40)
    heaps = Heaps(size, order, order)
    root = EMPTY

    def add(number: int) -> None:
        nonlocal root
        root = heaps.add(root, number)

    def remove(number: int) -> None:
        nonlocal root
        root = heaps.remove(root, number)

    most = 5 * size.bit_length()
    for number in range(size):
        assert calls(lambda number=number: add(number)) <= most  # type: ignore[misc]
    for number in range(0, 7 * size, 7):
        assert calls(lambda number=number: remove(number % size)) <= most  # type: ignore[misc]
    assert root == EMPTY


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 15), st.integers(0, 8)), max_size=80))
def test_ghosts_are_the_last_that_were_added(steps: list[tuple[bool, int, int]]) -> None:
    ghosts = Ghosts(8)
    model: list[int | None] = []
    for added, name, among in steps:
        mark = fingerprint(key(name))
        if added:
            ghosts.add(mark)
        else:
            assert ghosts.take(mark, among) == (mark in model[max(0, len(model) - among) :])
        model = [None if ghost == mark else ghost for ghost in model]
        if added:
            model.append(mark)


def test_a_full_table_forgets_the_oldest_and_never_invents() -> None:
    entries = 4096
    ghosts = Ghosts(entries)
    marks = [fingerprint(key(number)) for number in range(3 * entries)]
    for mark in marks:
        ghosts.add(mark)
    assert not any(ghosts.take(fingerprint(key(("other", number))), entries) for number in range(entries))
    recent = [ghosts.take(mark, entries) for mark in marks[-entries:]]
    assert sum(recent) > 0.97 * entries
    assert not any(ghosts.take(mark, entries) for mark in marks[:-entries])
