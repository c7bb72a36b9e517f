"""Bytes and seconds of a tier's orders."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvferry.data.meter import Meter


@given(orders=st.lists(st.tuples(st.floats(0, 100), st.floats(0, 100), st.integers(0, 9)), max_size=8))
def test_a_meter_counts_the_time_in_which_at_least_one_order_is_under_way(
    orders: list[tuple[float, float, int]],
) -> None:
    meter = Meter()
    moments = [(begin, 0, 0) for begin, _, _ in orders]
    moments += [(begin + length, 1, moved) for begin, length, moved in orders]
    expected, under_way, last = 0.0, 0, 0.0
    for now, ends, moved in sorted(moments):
        expected += now - last if under_way else 0.0
        under_way += -1 if ends else 1
        last = now
        if ends:
            meter.end(now, moved)
        else:
            meter.begin(now)
    assert meter.bytes == sum(moved for _, _, moved in orders)
    assert abs(meter.seconds - expected) < 1e-6
