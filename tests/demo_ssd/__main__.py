"""``make demo-ssd``: see :mod:`tests.demo_ssd.passes` for what it does and compares."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from tests.demo.passes import large_tier
from tests.demo.prompts import demo_prompts
from tests.demo.stage import FOLDER, Report, Stage, perform
from tests.demo_ssd.passes import after_kill, after_restart, interrupted_prompts, kill_during_stores
from tests.demo_ssd.report import failures, show_summary, show_table
from tests.e2e.checks import live

SSD_FOLDER = FOLDER / "ssd"
MEMORY_MIB = 96
"""About a third of what the prompts need."""
REPETITIONS = 3


def run(runtime_dir: Path, progress: Progress) -> Report:
    """Three engines on one folder: one fills it and is stopped, the next is killed, the last serves."""
    prompts, interrupted = demo_prompts(), interrupted_prompts()
    shutil.rmtree(SSD_FOLDER, ignore_errors=True)
    stage = Stage(runtime_dir, progress, engines=3, steps=4 * len(prompts) + len(interrupted))
    config = {
        "capacity": f"{MEMORY_MIB}MiB",
        "plugins": ["backend_ssd"],
        # As much in flight as the longest prompt has: here every prompt is to be stored.
        "lower": {"ssd": f"use: ssd, path: {SSD_FOLDER}, capacity: 1GiB, in_flight: 64MiB"},
    }
    with stage.engine("fills the SSD", **config) as engine:
        filled = large_tier(engine, prompts, REPETITIONS, stage.step("1 of 3, storing"))
    with stage.engine("again", **config) as engine:
        restarted = after_restart(
            engine,
            filled.rows,
            REPETITIONS,
            lambda: live(runtime_dir, "clear", "--tier", "cpu"),
            stage.step("2 of 3, from the SSD"),
        )
        kill_during_stores(engine, interrupted, SSD_FOLDER)
    with stage.engine("after the kill", **config, verify=True) as engine:
        killed = after_kill(
            engine, filled.rows, interrupted, restarted.adopted, stage.step("3 of 3, after kill -9")
        )

    def report(console: Console) -> list[str]:
        show_table(console, filled.rows, restarted.rows, killed.rows)
        direct = reads_directly(SSD_FOLDER)
        show_summary(console, filled, restarted, killed, memory_mib=MEMORY_MIB, direct=direct)
        wrong = failures(filled, restarted, killed, MEMORY_MIB)
        if not wrong:
            shutil.rmtree(SSD_FOLDER)
        return wrong

    return report


def reads_directly(folder: Path) -> bool:
    """Whether the largest file below can be opened for reads past the page cache."""
    largest = max(
        (file for file in folder.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size
    )
    try:
        os.close(os.open(largest, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        return False
    return True


def main() -> int:
    """0 when every answer was the same and every hit came from where it should."""
    return perform(run)


if __name__ == "__main__":
    sys.exit(main())
