"""Nearest-name hints help with slips and keep silent about names of other things."""

from __future__ import annotations

import string

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvferry.plugins.hints import closest

LETTERS = st.text(string.ascii_lowercase, min_size=4, max_size=12)
NAMES = st.lists(LETTERS, min_size=1, max_size=3).map("_".join)


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("npu", "cpu"),
        ("gpu", "cpu"),
        ("lfu", "lru"),
        ("mru", "lru"),
        ("nccl", "hccl"),
        ("fifo", "s3fifo"),
        ("backend_npu", "backend_cpu"),
        ("backend_ssd", "backend_cpu"),
        ("connector_sglang", "connector_vllm"),
        ("lookup_redis", "backend_redis"),
    ],
)
def test_another_thing_is_not_taken_for_a_slip(name: str, other: str) -> None:
    assert closest(name, [other]) is None
    assert closest(other, [name]) is None


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("LRU", "lru"),
        ("vLLM", "vllm"),
        ("vlm", "vllm"),
        ("cup", "cpu"),
        ("cpuu", "cpu"),
        ("connector_vlm", "connector_vllm"),
        ("backend-cpu", "backend_cpu"),
        ("BackendCpu", "backend_cpu"),
        ("isolated-lru", "isolated_lru"),
        ("isolatd_lru", "isolated_lru"),
    ],
)
def test_a_slip_is_understood(name: str, meant: str) -> None:
    assert closest(name, [meant, "disk", "backend_disk", "tape"]) == meant


@given(name=NAMES, at=st.integers(1, 40), letter=st.sampled_from(string.ascii_lowercase))
def test_one_letter_more_or_less_or_two_swapped_behind_the_first_are_slips(
    name: str, at: int, letter: str
) -> None:
    at = 1 + at % (len(name) - 1)
    assume("_" not in name[at - 1 : at + 2])
    more = name[:at] + letter + name[at:]
    less = name[:at] + name[at + 1 :]
    for wrong in (more, less):
        assert closest(wrong, [name]) == (name if wrong != name else None)
    swapped = name[: at - 1] + name[at] + name[at - 1] + name[at + 1 :]
    assume(at - 1 and name[at - 2] != "_" and swapped != name)
    assert closest(swapped, [name]) == name


@given(name=st.text(max_size=30), names=st.lists(st.text(max_size=30)))
def test_a_hint_is_one_of_the_other_names(name: str, names: list[str]) -> None:
    assert closest(name, names) in {None, *names} - {name}


@given(name=NAMES, other=NAMES)
def test_letter_case_and_the_sign_between_words_count_for_nothing(name: str, other: str) -> None:
    assume(name != other)
    assert closest(name.upper().replace("_", "-"), [name, other]) == name
