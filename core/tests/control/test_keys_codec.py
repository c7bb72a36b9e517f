"""The codec of chunk keys: injective, bounded, safe as a file name."""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.api import DIGEST_BYTES, ChunkKey

halves = st.one_of(
    st.binary(min_size=DIGEST_BYTES, max_size=DIGEST_BYTES),
    # Close neighbours: almost everything equal, which random bytes never are.
    st.integers(0, 40).map(lambda n: n.to_bytes(DIGEST_BYTES, "big")),
    st.integers(0, 40).map(lambda n: n.to_bytes(DIGEST_BYTES, "little")),
)
keys = st.builds(ChunkKey, halves, halves)


@given(keys)
def test_bytes_and_text_give_the_key_back(key: ChunkKey) -> None:
    assert ChunkKey.from_bytes(key.to_bytes()) == key
    assert ChunkKey.from_text(key.to_text()) == key


@given(keys)
def test_text_is_one_short_file_name_that_case_folding_leaves_alone(key: ChunkKey) -> None:
    text = key.to_text()
    assert len(text) == 105
    assert set(text) <= set(string.ascii_lowercase + "234567.")
    assert text.lower() == text
    assert not text.startswith(".")
    assert not text.endswith(".")  # some file systems drop a trailing full stop
    assert len(key.to_bytes()) == 64


@given(st.lists(keys, unique=True, max_size=30))
def test_distinct_keys_stay_distinct_even_where_case_is_folded(many: list[ChunkKey]) -> None:
    assert len({key.to_text().casefold() for key in many}) == len(many)
    assert len({key.to_bytes() for key in many}) == len(many)


@given(keys, st.data())
def test_a_text_that_was_altered_is_refused_or_is_another_key(key: ChunkKey, data: st.DataObject) -> None:
    text = key.to_text()
    at = data.draw(st.integers(0, len(text) - 1))
    letter = data.draw(st.sampled_from("abz27.A=/ 0\u0131ß\0"))
    altered = text[:at] + letter + text[at + 1 :]
    try:
        other = ChunkKey.from_text(altered)
    except ValueError:
        return
    assert other.to_text() == altered
    assert (other == key) == (altered == text)


@given(st.text(max_size=120))
def test_text_that_is_not_a_key_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        ChunkKey.from_text(text)


def test_a_refusal_does_not_repeat_a_text_of_any_length() -> None:
    with pytest.raises(ValueError) as caught:
        ChunkKey.from_text("." + "a" * 100_000)
    assert len(str(caught.value)) < 300


def test_halves_of_another_length_never_get_a_form() -> None:
    moved = ChunkKey(bytes(DIGEST_BYTES + 1), bytes(DIGEST_BYTES - 1))
    with pytest.raises(ValueError, match="32 bytes"):
        moved.to_bytes()
    with pytest.raises(ValueError, match="32 bytes"):
        moved.to_text()
    with pytest.raises(ValueError):
        ChunkKey.from_text("a" * 53 + "." + "a" * 51)
    with pytest.raises(ValueError, match="64 bytes"):
        ChunkKey.from_bytes(bytes(63))


def test_upper_case_and_unused_bits_are_refused() -> None:
    text = ChunkKey(bytes(DIGEST_BYTES), bytes(DIGEST_BYTES)).to_text()
    with pytest.raises(ValueError, match="not a chunk key"):
        ChunkKey.from_text(text.upper())
    with pytest.raises(ValueError, match="not a chunk key"):
        ChunkKey.from_text(text[:-1] + "b")  # same 32 bytes, other spare bits
