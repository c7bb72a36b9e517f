"""What all demos have in common: engines one after the other, a progress bar, a verdict."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from tests.demo.passes import Step
from tests.demo.prompts import CHUNK_TOKENS
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
START_STEPS = 12
"""How many prompts an engine's start counts for in the progress bar."""


class Stage:
    """Where a demo's engines run. ``steps`` is how often they will call what :meth:`step` returns."""

    def __init__(self, runtime_dir: Path, progress: Progress, *, engines: int, steps: int) -> None:
        self.runtime_dir = runtime_dir
        self._progress = progress
        self._task = progress.add_task(
            "making a model of 95 million parameters", total=engines * START_STEPS + steps
        )
        self._model = make_model(FOLDER, DEMO)

    def engine(self, name: str, **config: Any) -> Engine:
        """An engine that is not open yet; ``config`` is for :func:`tests.engines.write_config`."""
        self._progress.update(self._task, description=f"starting vLLM ({name})")
        slug = re.sub("[^a-z0-9]+", "-", name.lower())
        file = write_config(
            FOLDER / f"{slug}.yaml", runtime_dir=self.runtime_dir, chunk_tokens=CHUNK_TOKENS, **config
        )
        return Engine(
            engine_arguments(self._model, kv_transfer_config=KV_TRANSFER),
            engine_environment(KVFERRY_CONFIG=str(file)),
            FOLDER / f"engine-{slug}.log",
        )

    def step(self, text: str) -> Step:
        """The engine has started, and does ``text`` from now on."""
        self._progress.update(self._task, advance=START_STEPS, description=text)

        def step(what: str) -> None:
            self._progress.update(self._task, advance=1, description=f"{text}: {what}")

        return step


Report = Callable[[Console], list[str]]
"""Shows what was found and returns everything that must not be, one sentence each."""


def perform(run: Callable[[Path, Progress], Report]) -> int:
    """Run a demo with a folder for sockets, and show its report. 0 when nothing was wrong."""
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
            report = run(runtime, progress)
        except EngineError as error:
            console.print(f"[bold red]The demo failed:[/] {error}")
            return 1
    wrong = report(console)
    for sentence in wrong:
        console.print(f"[bold red]wrong:[/] {sentence}", highlight=False)
    console.print(f"{time.monotonic() - began:.0f} s; logs and the model are in {FOLDER}", highlight=False)
    return 1 if wrong else 0
