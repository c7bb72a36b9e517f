"""pack_tokens: the same bytes for any sequence of ints, and errors that name the item."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvferry_native

tokens = st.lists(
    st.one_of(st.integers(0, 300_000), st.sampled_from([0, 2**30 - 1, 2**30, 2**32 - 1])), max_size=50
)


class Wrapped(Sequence[int]):
    """A read-only view, as engines hand out."""

    def __init__(self, items: list[int]) -> None:
        self.items = items

    def __getitem__(self, index: Any) -> Any:
        return self.items[index]

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[int]:
        return iter(self.items)


@given(tokens)
def test_all_sequences_give_little_endian_words(items: list[int]) -> None:
    expected = struct.pack(f"<{len(items)}I", *items)
    same: list[Any] = [items, tuple(items), Wrapped(items), np.array(items, np.uint32)]
    for sequence in same:
        assert kvferry_native.pack_tokens(sequence) == expected


@pytest.mark.parametrize("bad", [-1, -(2**70), 2**32, 2**40, 2**80])
@pytest.mark.parametrize("container", [list, tuple, Wrapped])
def test_names_the_token_that_does_not_fit(bad: int, container: Any) -> None:
    with pytest.raises(ValueError, match=f"token 2 is {bad}"):
        kvferry_native.pack_tokens(container([5, 6, bad]))


@pytest.mark.parametrize(("bad", "kind"), [(1.0, "float"), ("7", "str"), (None, "NoneType")])
def test_names_the_item_that_is_no_integer(bad: Any, kind: str) -> None:
    with pytest.raises(TypeError, match=f"token 1 is a {kind}, not an int"):
        kvferry_native.pack_tokens([5, bad])


@pytest.mark.parametrize("bad", [{1, 2}, {1: 2}, iter([1]), 7, None])
def test_refuses_what_is_no_sequence(bad: Any) -> None:
    with pytest.raises(TypeError, match="sequence of ints"):
        kvferry_native.pack_tokens(bad)


def test_survives_a_list_that_an_item_empties() -> None:
    class Emptying:
        def __index__(self) -> int:
            items.clear()
            return 1

    items: list[Any] = [1, Emptying(), 3]
    with pytest.raises(RuntimeError, match="changed"):
        kvferry_native.pack_tokens(items)


def test_an_error_of_an_item_comes_through() -> None:
    class Broken:
        def __index__(self) -> int:
            raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        kvferry_native.pack_tokens([Broken()])
