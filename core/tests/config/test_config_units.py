"""Sizes and durations with units."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.config import format_duration, format_size, parse_duration, parse_size


@given(st.integers(0, 2**63 - 1) | st.sampled_from([10**n for n in range(19)]))
def test_a_size_reads_back_exactly(size: int) -> None:
    assert parse_size(format_size(size)) == size


@given(st.floats(1e-12, 1e12) | st.integers(0, 10**6).map(float))
def test_a_duration_reads_back_exactly(seconds: float) -> None:
    assert parse_duration(format_duration(seconds)) == seconds


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("16GiB", 16 * 2**30),
        ("512MiB", 512 * 2**20),
        ("1.5GiB", 3 * 2**29),
        ("5GB", 5 * 10**9),
        ("5GiB", 5 * 2**30),
        ("4KiB", 4096),
        ("4kB", 4000),
        ("4KB", 4000),
        ("1TiB", 2**40),
        ("0B", 0),
        (" 7 B ", 7),
        ("9223372036854775807B", 2**63 - 1),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("size", "text"), [(16 * 2**30, "16GiB"), (5 * 10**9, "5GB"), (1536, "1536B"), (0, "0B")]
)
def test_a_size_is_written_as_a_person_would(size: int, text: str) -> None:
    assert format_size(size) == text


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("250ms", 0.25), ("30s", 30.0), ("5min", 300.0), ("2h", 7200.0), ("10us", 1e-5), ("0s", 0.0)],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("5", "a size needs a unit: '5'"),
        ("-5GiB", "a size cannot be negative: '-5GiB'"),
        ("nan", "'nan' is not a size"),
        ("infGiB", "'infGiB' is not a size"),
        ("1e3GiB", "'1e3GiB' is not a size"),
        ("GiB", "'GiB' is not a size"),
        ("", "'' is not a size"),
        ("\u0665GiB", "'\u0665GiB' is not a size"),
        ("5\n GiB", "'5\\n GiB' is not a size"),
        ("0.3B", "'0.3B' is not a whole number of bytes"),
        ("8192PiB", "'8192PiB' is more than any machine holds"),
        ("5 gib", "unknown unit 'gib' in '5 gib'; did you mean 'GiB'"),
        (
            "5G",
            "unknown unit 'G' in '5G'; known are B, KB, kB, KiB, MB, MiB, GB, GiB, TB, TiB, PB, PiB",
        ),
        ("9" * 10_000, f"'{'9' * 37}...' is not a size"),
    ],
)
def test_a_bad_size_is_explained(text: str, problem: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_size(text)

    assert str(caught.value) == problem


@pytest.mark.parametrize("text", ["30", "-1s", "nans", "5m", "1h30min", "inf", "1d", ""])
def test_a_bad_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_duration(text)


@given(st.text())
def test_any_text_is_a_size_or_a_value_error(text: str) -> None:
    try:
        size = parse_size(text)
    except ValueError:
        return
    assert 0 <= size < 2**63
