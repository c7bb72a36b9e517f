"""``make demo-p2p``: see :mod:`tests.demo_p2p.passes` for what it does and compares."""

from __future__ import annotations

import itertools
import sys
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from tests.controllers import controller_status, keys_told, running_controller
from tests.demo.stage import Report, Stage, perform
from tests.demo_p2p.modes import CHANNELS, MODES, Way, config
from tests.demo_p2p.passes import Shared, borrow, fill, shared_prompts, wait_told
from tests.demo_p2p.report import failures, show_prompts, show_summary, show_ways
from tests.e2e.checks import live
from tests.engines import Engine

CAPACITY = "1GiB"
REPETITIONS = 3
HOLDER, BORROWER = "first", "second"


def run(runtime_dir: Path, progress: Progress) -> Report:
    """A controller, and for each way two engines: one computes, the other reads from it."""
    ways = [Way(mode=mode, channel=channel) for channel in CHANNELS for mode in MODES]
    groups = [list(group) for _, group in itertools.groupby(ways, lambda way: (way.channel, way.mode.holder))]
    prompts = shared_prompts()
    stage = Stage(
        runtime_dir,
        progress,
        engines=len(groups) + len(ways),
        steps=len(groups) * (len(prompts) + 1) + len(ways) * len(prompts),
    )
    shared: dict[Way, Shared] = {}
    status = ""
    with running_controller() as url:

        def engine(way: Way, name: str) -> Engine:
            settings = config(way, url, name=name, lends=name == HOLDER)
            return stage.engine(f"{name} {way}", capacity=CAPACITY, **settings)

        for group in groups:
            with ExitStack() as stack:
                holder, borrower = engine(group[0], HOLDER), engine(group[0], BORROWER)
                for each in (holder, borrower):
                    each.start()
                    stack.callback(each.close)
                for each in (holder, borrower):
                    each.wait_ready()
                held = fill(holder, prompts, stage.step(f"{group[0].channel}, {HOLDER} instance"))
                wait_told(lambda: keys_told(url).get(HOLDER, 0), prompts)
                for way in group:
                    if way is not group[0]:
                        borrower.close()
                        borrower = engine(way, BORROWER)
                        stack.callback(borrower.close)
                        borrower.open()
                    shared[way] = borrow(
                        borrower,
                        holder,
                        held,
                        REPETITIONS,
                        lambda: live(runtime_dir, "clear", "--instance", BORROWER),
                        stage.step(f"{way}, {BORROWER} instance"),
                    )
                    status = status or controller_status(url)

    def report(console: Console) -> list[str]:
        console.rule("kvferry controller status, after the first way", align="left")
        console.print(status, highlight=False, markup=False, soft_wrap=True)
        console.print()
        show_prompts(console, shared)
        show_ways(console, shared)
        show_summary(console, shared)
        wrong = failures(shared)
        if not all(name in status for name in (HOLDER, BORROWER)):
            wrong.append("the controller did not show both instances")
        return wrong

    return report


def main() -> int:
    """0 when every answer was the same and every hit came from the peer."""
    return perform(run)


if __name__ == "__main__":
    sys.exit(main())
