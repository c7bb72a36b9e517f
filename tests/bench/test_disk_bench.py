"""The disk bench on a small scale: every row comes out, and what cannot be measured says why."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from tests.bench import disk, restart
from tests.bench.__main__ import show
from tests.bench.disk import take_turns
from tests.bench.figures import DISK, Verdict
from tests.bench.fio import FioJob, fio_missing
from tests.bench.lmcache_disk import LMCacheDisk, LMCacheMissing, make_environment
from tests.bench.ssd_tier import SSDTier

pytest.importorskip("kvferry_backend_ssd")


def test_a_tier_keeps_its_window_full_and_finds_every_chunk(tmp_path: Path) -> None:
    with SSDTier(tmp_path, 8192, 40, 4) as tier:
        assert tier.recover() == []
        assert tier.write() > 0
        assert tier.read() > 0
        tier.clear()
        with pytest.raises(RuntimeError, match="MISS"):
            tier.read()
        assert tier.batch(range(10, 14), write=True) > 0
        assert tier.batch(range(10, 14), write=False) > 0
    with SSDTier(tmp_path, 8192, 40, 4) as tier:
        assert [header.depth for header in tier.recover()] == [10, 11, 12, 13]


def test_a_restart_brings_everything_back_into_an_index(tmp_path: Path) -> None:
    figures = restart.run(tmp_path, chunks=300)
    assert figures["bytes_per_chunk"] == figures["scheduler_bytes"] + figures["rank_bytes"]
    assert min(figures.values()) > 0


def test_whoever_takes_turns_begins_in_turn() -> None:
    log: list[str] = []

    def one(name: str, seconds: float) -> Callable[[], float]:
        return lambda: log.append(name) or seconds  # type: ignore[func-returns-value]

    figures = take_turns({"ours": one("ours", 2.0), "theirs": one("theirs", 3.0)}, 6 * 10**9, 2)
    assert log == ["ours", "theirs", "theirs", "ours"]
    assert figures == {"ours GB/s": 3.0, "theirs GB/s": 2.0, "to theirs": 1.5}


@pytest.mark.skipif(bool(fio_missing()), reason=fio_missing())
@pytest.mark.parametrize("write", [True, False])
def test_fio_is_understood(tmp_path: Path, write: bool) -> None:
    job = FioJob(write=write, block=1 << 20, depth=4, total=8 << 20, durable=write)
    assert 0 < job.run(tmp_path / "file") < 60
    with pytest.raises(RuntimeError, match="fio failed"):
        job.run(tmp_path)  # a folder


def test_what_was_left_out_is_absent_and_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "ROOM_BYTES", 1 << 62)
    result = disk.run()
    assert "GiB left" in result["left_out"]["everything"]
    assert {figure.verdict(figure.value(result)) for figure in DISK} == {Verdict.ABSENT}
    show(Console(file=io.StringIO()), "disk", DISK, result)


def test_an_environment_without_its_program_says_so(tmp_path: Path) -> None:
    with (
        pytest.raises(LMCacheMissing, match="does not start"),
        LMCacheDisk(Path("/bin/false"), tmp_path, 1 << 20, 2, direct=True),
    ):
        pass


def test_an_installation_that_fails_says_which_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.bench.lmcache_disk.LMCACHE", str(tmp_path / "no-such-package"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(LMCacheMissing, match="pip install -q --no-deps"):
        make_environment(tmp_path / "environment")
