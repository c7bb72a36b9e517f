"""The digest table against a dictionary, with digests that crowd into few buckets."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.control.index import DigestTable

ROWS = 40


def crowded(number: int) -> bytes:
    """Few buckets and few tags, so that full buckets and equal tags are the rule."""
    bucket = (number % 3).to_bytes(8, "little")
    tag = (number % 5).to_bytes(4, "little")
    return bucket + tag + tag + number.to_bytes(16, "little")


@given(
    st.lists(st.tuples(st.sampled_from("++-"), st.integers(0, ROWS - 1), st.integers(0, 60))),
    st.lists(st.integers(0, 60), max_size=8),
)
@settings(max_examples=200, deadline=None)
def test_it_finds_what_a_dictionary_finds(steps: list[tuple[str, int, int]], run: list[int]) -> None:
    table = DigestTable(ROWS)
    model: dict[bytes, int] = {}
    for what, row, number in steps:
        listed = row in model.values()
        if what == "+" and not listed:
            table.store(row, crowded(number))
            table.list_row(row)
            model[crowded(number)] = row
        elif what == "-":
            assert table.unlist_row(row) == listed
            model = {digest: at for digest, at in model.items() if at != row}
        assert len(table) == len(model)
    for number in range(61):
        assert table.find(crowded(number)) == model.get(crowded(number), -1)
    digests = [crowded(number) for number in run]
    expected = []
    for digest in digests:
        if digest not in model:
            break
        expected.append(model[digest])
    assert table.find_run(digests).tolist() == expected
    assert dict(table.listed()) == model


def test_zeros_are_a_digest_like_any_other() -> None:
    table = DigestTable(2)
    zeros = bytes(32)
    assert table.find(zeros) == -1
    assert table.find_run([zeros]).tolist() == []
    table.store(1, zeros)
    table.list_row(1)
    assert table.find(zeros) == 1
    assert table.find_run([zeros, zeros[:-1] + b"1"]).tolist() == [1]


def test_a_digest_of_another_length_is_refused_in_bulk() -> None:
    with pytest.raises(ValueError):
        DigestTable(2).find_run([b"short"])
