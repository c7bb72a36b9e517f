"""Commands that tests run to their end."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path


def call(
    *command: str | Path,
    cwd: Path | None = None,
    without: tuple[str, ...] = (),
    environment: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command. Of the variables around, those that begin with one of ``without`` are left out;
    ``environment`` comes on top."""
    around = {name: value for name, value in os.environ.items() if not name.startswith(without)}
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**around, **(environment or {})},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def output_of(command: tuple[str | Path, ...], done: subprocess.CompletedProcess[str]) -> str:
    """What a command printed that must have succeeded."""
    assert done.returncode == 0, f"{command} gave {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout
