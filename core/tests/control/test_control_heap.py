"""The heap of waiting leaves against a sorted list."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvferry.control.heap import Heap

ROWS = 40
steps = st.lists(st.tuples(st.integers(0, ROWS - 1), st.integers(0, 9)), max_size=200)


@given(steps=steps)
def test_the_first_is_the_least_whoever_comes_and_leaves(steps: list[tuple[int, int]]) -> None:
    heap, held = Heap(ROWS), dict[int, int]()
    for number, order in steps:
        if number in held:
            heap.remove(number)
            del held[number]
        else:
            heap.add(number, order)
            held[number] = order
        assert len(heap) == len(held)
        assert not held or heap.first() == min((order, number) for number, order in held.items())
    left = []
    while len(heap):
        left.append(heap.first())
        heap.remove(left[-1][1])
    assert left == sorted((order, number) for number, order in held.items())


@given(numbers=st.permutations(range(ROWS)), leaving=st.permutations(range(ROWS)))
def test_any_of_them_can_leave(numbers: list[int], leaving: list[int]) -> None:
    heap = Heap(ROWS)
    for order, number in enumerate(numbers):
        heap.add(number, order)
    for at, number in enumerate(leaving):
        heap.remove(number)
        left = leaving[at + 1 :]
        assert not left or heap.first()[1] == min(left, key=numbers.index)
