"""copy_spans: the right bytes and no others, without the GIL; everything malformed is refused."""

from __future__ import annotations

import array
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import kvferry_native

POISON = 0xA5
Words = NDArray[np.uint64]


@st.composite
def plans(draw: st.DrawFn) -> tuple[list[tuple[int, int]], int, int]:
    """Pieces ``(gap before, length)`` in destination order, a seed for the order of the sources, and
    how the addresses are skewed against cache lines."""
    piece = st.tuples(st.integers(0, 70), st.sampled_from([0, 1, 63, 64, 65, 1000, 4096, 40_000]))
    return (
        draw(st.lists(piece, max_size=30)),
        draw(st.integers(0, 2**16)),
        draw(st.integers(0, 64)),
    )


@settings(max_examples=60, deadline=None)
@given(plans(), st.integers(1, 4), st.booleans())
def test_copies_exactly_the_spans(
    plan: tuple[list[tuple[int, int]], int, int], threads: int, large: bool
) -> None:
    pieces, seed, skew = plan
    if large:  # enough for several threads and for stores past the cache
        pieces = [*pieces, (3, 3_000_000), (0, 2_000_000)]
    random = np.random.default_rng(seed)
    total = sum(gap + length for gap, length in pieces) + skew + 64
    source = random.integers(0, 256, total, np.uint8)
    target = np.full(total, POISON, np.uint8)
    expected = target.copy()
    order = random.permutation(len(pieces))
    begin_in_source = np.zeros(len(pieces), np.int64)
    at = 0
    for index in order:
        begin_in_source[index] = at
        at += pieces[index][1]
    rows: list[tuple[int, int, int]] = []
    at = skew
    for (gap, length), start in zip(pieces, begin_in_source.tolist(), strict=True):
        at += gap
        expected[at : at + length] = source[start : start + length]
        rows.append((target.ctypes.data + at, source.ctypes.data + start, length))
        at += length
    random.shuffle(rows)
    table = np.array(rows, np.uint64).reshape(-1, 3).T.copy()
    untouched = source.copy()

    kvferry_native.copy_spans(table[0], table[1], table[2], threads)

    assert np.array_equal(target, expected)
    assert np.array_equal(source, untouched)


def words(*values: int) -> Words:
    return np.array(values, np.uint64)


@pytest.mark.parametrize(
    ("columns", "error", "text"),
    [
        ((words(1), words(1, 2), words(0)), ValueError, "src must have as many items"),
        ((words(1), words(1), words(0, 0)), ValueError, "length must have as many items"),
        ((words(1), words(1), np.array([0], np.int64)), TypeError, "length must hold uint64"),
        ((words(1), np.array([1.0]), words(0)), TypeError, "src must hold uint64"),
        ((np.array([1], ">u8"), words(1), words(0)), TypeError, "dst must hold uint64"),
        ((words(1, 2, 3)[::2], words(1, 2), words(0, 0)), ValueError, "dst must be contiguous"),
        ((words(1).reshape(1, 1), words(1), words(0)), ValueError, "dst must have one dimension"),
        (([1], words(1), words(0)), TypeError, "buffer|bytes-like"),
        ((words(2**64 - 8), words(64), words(9)), ValueError, "wraps"),
        ((words(64), words(2**64 - 8), words(9)), ValueError, "wraps"),
    ],
)
def test_refuses_what_is_malformed(
    columns: tuple[Words, Words, Words], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        kvferry_native.copy_spans(*columns)


def test_refuses_to_copy_on_no_thread() -> None:
    with pytest.raises(ValueError, match="threads"):
        kvferry_native.copy_spans(words(1), words(1), words(0), threads=0)


def test_a_wrapping_span_stops_the_whole_plan() -> None:
    source, target = np.ones(8, np.uint8), np.zeros(8, np.uint8)
    with pytest.raises(ValueError, match="wraps"):
        kvferry_native.copy_spans(
            words(target.ctypes.data, 2**64 - 8), words(source.ctypes.data, 64), words(8, 9)
        )
    assert not target.any()


def test_takes_any_buffer_of_uint64() -> None:
    source, target = np.arange(5, dtype=np.uint8), np.zeros(5, np.uint8)
    kvferry_native.copy_spans(
        array.array("Q", [target.ctypes.data]),
        array.array("Q", [source.ctypes.data]),
        memoryview(array.array("Q", [5])),
    )
    assert np.array_equal(source, target)


def test_other_threads_run_during_a_copy(
    lets_others_run: Callable[[Callable[[], object]], bool],
) -> None:
    source = np.ones(128 << 20, np.uint8)
    target = np.zeros(128 << 20, np.uint8)
    columns = (words(target.ctypes.data), words(source.ctypes.data), words(len(source)))
    assert lets_others_run(lambda: kvferry_native.copy_spans(*columns))
    assert target.all()
