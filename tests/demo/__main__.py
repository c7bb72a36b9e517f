"""``make demo``: see :mod:`tests.demo.passes` for what it does and compares."""

from __future__ import annotations

import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from tests.demo.invalid import show_invalid
from tests.demo.passes import Pass, ServedSmall, Step, large_tier, small_tier
from tests.demo.prompts import CHUNK_TOKENS, demo_prompts
from tests.demo.report import failures, show_summary, show_table
from tests.engines import (
    KV_TRANSFER,
    REPOSITORY,
    Engine,
    EngineError,
    engine_arguments,
    engine_environment,
    vllm_missing,
    write_config,
)
from tests.models import DEMO, make_model

FOLDER = REPOSITORY / ".demo"
LARGE = "2GiB"
REPETITIONS = 3
START_STEPS = 12
"""How many prompts an engine's start counts for in the progress bar."""


class Demo:
    """The three passes, one engine after the other."""

    def __init__(self, folder: Path, runtime_dir: Path, progress: Progress) -> None:
        self._folder = folder
        self._runtime_dir = runtime_dir
        self._progress = progress
        self._prompts = demo_prompts()
        steps = 3 * START_STEPS + 6 * len(self._prompts)
        self._task = progress.add_task("preparing", total=steps)

    def run(self) -> tuple[Pass, Pass, tuple[ServedSmall, ...], dict[str, float]]:
        """Timed, verified, small tier; the last with its counters."""
        self._progress.update(self._task, description="making a model of 95 million parameters")
        self._model = make_model(self._folder, DEMO)
        with self._engine("timed", LARGE, verify=False) as engine:
            timed = large_tier(engine, self._prompts, REPETITIONS, self._step("1 of 3, timing"))
        # Digests take longer than the copies, so this pass shows bytes and no times.
        with self._engine("verified", LARGE, verify=True) as engine:
            verified = large_tier(engine, self._prompts, 1, self._step("2 of 3, comparing bytes"))
        third = max(1, int(timed.counters["saved_bytes"]) // 3 >> 20)
        with self._engine("small", f"{third}MiB", verify=True) as engine:
            small, counters = small_tier(engine, self._prompts, self._step(f"3 of 3, a tier of {third} MiB"))
        return timed, verified, small, counters

    def _engine(self, name: str, capacity: str, *, verify: bool) -> Engine:
        self._progress.update(self._task, description=f"starting vLLM ({name})")
        config = write_config(
            self._folder / "kvferry.yaml",
            runtime_dir=self._runtime_dir,
            capacity=capacity,
            chunk_tokens=CHUNK_TOKENS,
            verify=verify,
        )
        return Engine(
            engine_arguments(self._model, kv_transfer_config=KV_TRANSFER),
            engine_environment(KVFERRY_CONFIG=str(config)),
            self._folder / f"engine-{name}.log",
        )

    def _step(self, text: str) -> Step:
        self._progress.update(self._task, advance=START_STEPS, description=text)

        def step(what: str) -> None:
            self._progress.update(self._task, advance=1, description=f"{text}: {what}")

        return step


def main() -> int:
    """0 when every answer was the same and every hit was where it should be."""
    console = Console()
    missing = vllm_missing()
    if missing is not None:
        console.print(f"The demo needs a real vLLM: {missing}.")
        return 2
    FOLDER.mkdir(exist_ok=True)
    began = time.monotonic()
    with ExitStack() as stack:
        # Short, because a socket's path is at most 107 bytes long, and the repository's may be longer.
        runtime = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvferry-demo-")))
        progress = stack.enter_context(
            Progress(
                SpinnerColumn(),
                TextColumn("{task.description:<45}"),
                BarColumn(),
                TimeElapsedColumn(),
                console=console,
                transient=True,
            )
        )
        try:
            timed, verified, small, counters = Demo(FOLDER, runtime, progress).run()
        except EngineError as error:
            console.print(f"[bold red]The demo failed:[/] {error}")
            return 1
    show_table(console, timed.rows, verified.rows, small)
    show_summary(console, timed.rows, verified, small, counters)
    wrong = failures(timed.rows, verified, small, counters)
    wrong += show_invalid(console, FOLDER)
    for sentence in wrong:
        console.print(f"[bold red]wrong:[/] {sentence}", highlight=False)
    console.print(f"{time.monotonic() - began:.0f} s; logs and the model are in {FOLDER}", highlight=False)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
