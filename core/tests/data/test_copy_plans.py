"""Both copiers move the same bytes; checked ones refuse every address outside of the regions."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvferry.api import ErrorKind, KVFerryError, Region
from kvferry.data.bounds import AddressColumn, CopyPlan, RegionBounds, check_plan
from kvferry.data.copy import CheckedCopier, NullCopier, NumpyCopier, SpanCopier, choose_copier

POISON = 0x5A
Bytes = NDArray[np.uint8]


@pytest.fixture(params=["native", "numpy"])
def copier(request: pytest.FixtureRequest) -> SpanCopier:
    if request.param == "native":
        pytest.importorskip("kvferry_native", reason="kvferry-native is not installed")
    return choose_copier(request.param).copier


def region_of(name: str, memory: Bytes) -> Region:
    return Region(name=name, address=memory.ctypes.data, length=len(memory), keep_alive=memory)


def words(*values: int) -> AddressColumn:
    return np.array(values, np.uint64)


def plan_of(rows: list[tuple[int, int, int]]) -> CopyPlan:
    table = np.array(rows, np.uint64).reshape(-1, 3).T.copy()
    return CopyPlan(table[0], table[1], table[2])


@st.composite
def paged_plans(draw: st.DrawFn) -> tuple[int, list[int], list[int], int]:
    """Page length, pages of the pool in plan order, places in the flat side, a seed for bytes.

    Neighbours on both sides are common, so joined runs are covered.
    """
    page = draw(st.sampled_from([1, 48, 512, 4096, 20_000]))
    count = draw(st.integers(0, 24))
    pages = draw(st.permutations(range(24))) if draw(st.booleans()) else list(range(24))
    places = draw(st.permutations(range(count))) if draw(st.booleans()) else list(range(count))
    return page, list(pages[:count]), places, draw(st.integers(0, 999))


@settings(max_examples=50, deadline=None)
@given(paged_plans(), st.booleans())
def test_both_copiers_equal_the_reference(
    shape: tuple[int, list[int], list[int], int], scatter: bool
) -> None:
    pytest.importorskip("kvferry_native", reason="kvferry-native is not installed")
    page, pages, places, seed = shape
    pool_size, flat_size = 26 * page, (len(places) + 2) * page
    source_size, target_size = (flat_size, pool_size) if scatter else (pool_size, flat_size)
    source = np.random.default_rng(seed).integers(0, 256, source_size, np.uint8)
    expected = np.full(target_size, POISON, np.uint8)
    offsets = [
        ((page_at + 1) * page, (place + 1) * page) for page_at, place in zip(pages, places, strict=True)
    ]
    if not scatter:
        offsets = [(flat, pool) for pool, flat in offsets]
    for to, origin in offsets:
        expected[to : to + page] = source[origin : origin + page]

    for name in ("native", "numpy"):
        target = np.full(target_size, POISON, np.uint8)  # its first and last page are guards
        rows = [(target.ctypes.data + to, source.ctypes.data + origin, page) for to, origin in offsets]
        plan = plan_of(rows)
        regions = [region_of("target", target), region_of("source", source)]
        checked = CheckedCopier(choose_copier("native" if name == "native" else "numpy").copier, regions)
        checked.copy(plan.destination, plan.source, plan.length)
        assert np.array_equal(target, expected), name


def test_large_spans_and_odd_lengths(copier: SpanCopier) -> None:
    source = np.arange(5_000_003, dtype=np.uint8)
    target = np.full(5_000_005, POISON, np.uint8)
    to, origin = target.ctypes.data + 1, source.ctypes.data
    lengths = [3_000_000, 0, 1, 2_000_002]
    rows = []
    at = 0
    for length in lengths:
        rows.append((to + at, origin + at, length))
        at += length
    plan = plan_of([rows[3], rows[0], rows[1], rows[2]])
    copier.copy(plan.destination, plan.source, plan.length)
    assert np.array_equal(target[1:-1], source)
    assert target[0] == target[-1] == POISON


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: (words(1), words(1, 2), words(0)), ValueError),
        (lambda: (words(1), words(1), words(0, 0)), ValueError),
        (lambda: (words(1), words(1), np.array([0], np.int64)), TypeError),
        (lambda: (words(1, 2, 3)[::2], words(1, 2), words(0, 0)), ValueError),
        (lambda: (words(1).reshape(1, 1), words(1), words(0)), ValueError),
        (lambda: (words(2**64 - 8), words(64), words(9)), ValueError),
        (lambda: (words(64), words(2**64 - 8), words(9)), ValueError),
    ],
)
def test_both_copiers_refuse_the_same(
    copier: SpanCopier,
    make: Callable[[], tuple[AddressColumn, AddressColumn, AddressColumn]],
    error: type[Exception],
) -> None:
    with pytest.raises(error):
        copier.copy(*make())


SIZE = 1000


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 1500)), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 2000)), max_size=6),
)
def test_a_span_passes_exactly_when_one_region_holds_it(
    places: list[tuple[int, int]], spans: list[tuple[int, int]]
) -> None:
    base = 1 << 40
    regions = [
        Region(name=str(number), address=base + start, length=length)
        for number, (start, length) in enumerate(places)
    ]
    inside = all(
        length == 0 or any(start <= at and at + length <= start + size for start, size in places)
        for at, length in spans
    )
    bounds = RegionBounds.of(regions)
    address = np.array([base + at for at, _ in spans], np.uint64)
    length = np.array([length for _, length in spans], np.uint64)
    if inside:
        bounds.check("source", address, length)
    else:
        with pytest.raises(KVFerryError) as caught:
            bounds.check("source", address, length)
        assert caught.value.kind is ErrorKind.PROTOCOL


def test_a_small_region_inside_a_large_one_hides_nothing() -> None:
    large, small = (
        Region(name="large", address=1000, length=1000),
        Region(name="small", address=1100, length=10),
    )
    for regions in ([large, small], [small, large]):
        check_plan(plan_of([(1105, 1500, 400), (1990, 1000, 10)]), regions)
        with pytest.raises(KVFerryError):
            check_plan(plan_of([(1991, 1000, 10)]), regions)


@pytest.mark.parametrize("side", ["destination", "source"])
@pytest.mark.parametrize("shift", [-1, 1])
def test_a_plan_one_byte_outside_copies_nothing(copier: SpanCopier, side: str, shift: int) -> None:
    source, target = np.ones(SIZE, np.uint8), np.zeros(SIZE + 2, np.uint8)[1:-1]
    regions = [region_of("target", target), region_of("source", source)]
    good = (target.ctypes.data, source.ctypes.data, 8)
    edge = 0 if shift < 0 else SIZE - 8
    bad = (
        target.ctypes.data + edge + (shift if side == "destination" else 0),
        source.ctypes.data + edge + (shift if side == "source" else 0),
        8,
    )
    plan = plan_of([good, bad])
    with pytest.raises(KVFerryError, match="span 1 ") as caught:
        CheckedCopier(copier, regions).copy(plan.destination, plan.source, plan.length)
    assert f"its {side} has 8 bytes" in caught.value.why
    assert not target.any()


def test_a_region_may_be_read_only_for_plans() -> None:
    source, target = np.ones(SIZE, np.uint8), np.zeros(SIZE, np.uint8)
    readable, writable = region_of("engine", source), region_of("arena", target)
    plan = plan_of([(target.ctypes.data, source.ctypes.data, 8)])
    back = CopyPlan(plan.source, plan.destination, plan.length)
    check_plan(plan, [readable], written=[writable])
    check_plan(back, [readable, writable])
    with pytest.raises(KVFerryError, match="outside of every region"):
        check_plan(back, [readable, writable], written=[writable])


def test_lengths_near_the_end_of_the_address_space_do_not_overflow_the_check() -> None:
    regions = [Region(name="low", address=1000, length=100)]
    for address, length in [(2**64 - 1, 1), (1000, 2**64 - 1000), (1050, 2**63), (0, 2**64 - 1)]:
        with pytest.raises((KVFerryError, ValueError)):
            check_plan(plan_of([(address, 1000, length)]), regions)
        with pytest.raises(KVFerryError):
            RegionBounds.of(regions).check("source", words(address), words(length))


def test_without_regions_only_empty_spans_pass() -> None:
    check_plan(plan_of([(7, 9, 0)]), [])
    with pytest.raises(KVFerryError, match="outside"):
        check_plan(plan_of([(7, 9, 1)]), [])


def test_the_null_copier_copies_nothing() -> None:
    source, target = np.ones(SIZE, np.uint8), np.zeros(SIZE, np.uint8)
    NullCopier().copy(words(target.ctypes.data), words(source.ctypes.data), words(SIZE))
    assert not target.any()


def test_the_numpy_copier_needs_no_native_code() -> None:
    chosen = choose_copier("numpy")
    assert isinstance(chosen.copier, NumpyCopier)
    assert "asked for" in chosen.why
