"""The benches of reads between instances measure what their figures name, and say what they leave out."""

from __future__ import annotations

from pathlib import Path

import pytest
from attrs import evolve

from tests.bench import delayed_pull
from tests.bench.environments import PackageMissing, kept_environment
from tests.bench.p2p_figures import P2P
from tests.bench.turns import speedup, take_turns
from tests.bench.watched_sharing import Marks


def test_runs_take_turns_and_the_last_begins_the_next_round() -> None:
    order: list[str] = []

    def run(name: str, seconds: float) -> float:
        order.append(name)
        return seconds

    seconds = take_turns({name: lambda name=name: run(name, len(name)) for name in ("a", "bb")}, 3)  # type: ignore[misc]
    assert order == [*("a", "bb"), *("a", "bb"), *("bb", "a"), *("a", "bb")]
    assert seconds == {"a": [1.0] * 3, "bb": [2.0] * 3}
    assert speedup(seconds, "a", "bb") == 2.0


def test_a_kept_environment_is_made_once_and_anew_after_an_interruption(tmp_path: Path) -> None:
    check = "import attrs"
    python = kept_environment(tmp_path, "nothing", (), check)
    (place,) = tmp_path.iterdir()
    (place / "kept").touch()
    assert kept_environment(tmp_path, "nothing", (), check) == python
    assert (place / "kept").exists()
    (place / "ready").unlink()
    kept_environment(tmp_path, "nothing", (), check)
    assert not (place / "kept").exists()


def test_an_environment_without_its_package_is_not_kept(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(PackageMissing, match="no_such_package_anywhere"):
            kept_environment(tmp_path, "nothing", (), "import no_such_package_anywhere")


def test_what_was_marked_twice_happened_first(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter((1.0, 2.0, 5.0))
    monkeypatch.setattr("time.perf_counter", lambda: next(times))
    marks = Marks()
    marks.begin()
    marks.note("read")
    marks.note("read")
    assert marks.between("begin", "read") == 1.0
    with pytest.raises(TimeoutError, match="no 'found'"):
        marks.wait("found", 0.01)


def test_pulls_bring_the_right_bytes_both_ways_and_each_figure_is_measured() -> None:
    result = delayed_pull.run(rounds=1, sizes=(2,))
    figures = [figure for figure in P2P if figure.bench == "delayed_pull" and "64" not in figure.path[0]]
    assert figures
    for figure in figures:
        path = [part.replace("16 chunks", "2 chunks") for part in figure.path]
        assert evolve(figure, path=path).value(result) is not None, path
