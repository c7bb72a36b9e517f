"""``make demo``: see :mod:`tests.demo.passes` for what it does and compares."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from tests.demo.invalid import show_invalid
from tests.demo.passes import large_tier, small_tier
from tests.demo.prompts import demo_prompts
from tests.demo.report import failures, show_summary, show_table
from tests.demo.stage import FOLDER, Report, Stage, perform

LARGE = "2GiB"
REPETITIONS = 3


def run(runtime_dir: Path, progress: Progress) -> Report:
    """Three passes, one engine after the other: timed, verified, with a small tier."""
    prompts = demo_prompts()
    stage = Stage(runtime_dir, progress, engines=3, steps=6 * len(prompts))
    with stage.engine("timed", capacity=LARGE) as engine:
        timed = large_tier(engine, prompts, REPETITIONS, stage.step("1 of 3, timing"))
    # Digests take longer than the copies, so this pass shows bytes and no times.
    with stage.engine("verified", capacity=LARGE, verify=True) as engine:
        verified = large_tier(engine, prompts, 1, stage.step("2 of 3, comparing bytes"))
    third = max(1, int(timed.counters["saved_bytes"]) // 3 >> 20)
    with stage.engine("small", capacity=f"{third}MiB", verify=True) as engine:
        small, counters = small_tier(engine, prompts, stage.step(f"3 of 3, a tier of {third} MiB"))

    def report(console: Console) -> list[str]:
        show_table(console, timed.rows, verified.rows, small)
        show_summary(console, timed.rows, verified, small, counters)
        return failures(timed.rows, verified, small, counters) + show_invalid(console, FOLDER)

    return report


def main() -> int:
    """0 when every answer was the same and every hit was where it should be."""
    return perform(run)


if __name__ == "__main__":
    sys.exit(main())
