"""Reports at the width of a terminal."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvferry.cli.layout import wrapped

from .conftest import CONFIG, CommandLine

WORDS = st.lists(st.text("abcxyz/.-", min_size=1, max_size=12), min_size=1, max_size=40).map(" ".join)
LABELS = st.sampled_from(["", "  fix      ", "  why  ", "  fact     ", "error[ZOO001] "])
LINES = st.tuples(LABELS, WORDS).map("".join)


@given(st.lists(LINES, min_size=1, max_size=6).map("\n".join), st.integers(60, 120))
def test_no_line_is_wider_and_no_word_is_lost(text: str, columns: int) -> None:
    shown = wrapped(text, columns)
    assert max(map(len, shown.split("\n"))) <= columns
    assert shown.split() == text.split()


@given(st.lists(LINES, min_size=1, max_size=6).map("\n".join))
def test_a_pipe_breaks_nothing(text: str) -> None:
    assert wrapped(text, None) == text


def test_what_stands_behind_a_label_is_broken_below_itself() -> None:
    shown = wrapped("error[ZOO001] it does not fit\n  fix      make it as small as it can be", 36)
    assert shown.splitlines() == [
        "error[ZOO001] it does not fit",
        "  fix      make it as small as it",
        "           can be",
    ]


def test_a_path_stays_in_one_piece() -> None:
    path = "/a-very-long/folder-with/many-parts/that-does-not/fit-into-the-line/c.yaml"
    assert path in wrapped(f"error[config] {path}:1:1: tears: unknown key", 40).splitlines()[1]


def test_a_report_keeps_to_the_width(shell: CommandLine) -> None:
    shell.columns = 80
    file = shell.write(CONFIG.replace("8GiB", "40GiB"))
    out = shell.run("check", file).out
    assert max(map(len, out.splitlines())) <= 80
    shell.columns = None
    assert out.split() == shell.run("check", file).out.split()
