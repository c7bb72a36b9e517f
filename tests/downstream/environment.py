"""A clean virtual environment with kvferry and a third party's plugin in it, both from wheels."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import commands

ROOT = Path(__file__).parents[2]
ACME = Path(__file__).parent / "acme_lmdb"


class Downstream:
    """What an author's machine looks like: nothing of this repository is on any path."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "venv/bin/python"

    def build(self) -> None:
        """Make wheels and install them. Skips the test where no package index can be reached."""
        run(sys.executable, "-m", "venv", self.folder / "venv")
        asked = call(
            self.python, "-m", "pip", "download", "-q", "--retries", "1", "--no-deps", "-d",
            self.folder / "wheels", "lmdb",
        )  # fmt: skip
        if asked.returncode != 0:
            pytest.skip(f"pip reaches no package index: {asked.stderr.strip().splitlines()[-1]}")
        sources = [ROOT / "core", ROOT / "plugins/backend_cpu", ACME]
        pip = (self.python, "-m", "pip")
        install = (*pip, "install", "-q", "--no-compile")  # most of it is never imported
        run(*install, "hatchling")  # once for all of them, instead of once for each
        run(*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", self.folder / "wheels", *sources)
        wheels = sorted((self.folder / "wheels").glob("*.whl"))
        run(*install, "--find-links", self.folder / "wheels", *wheels, "kvferry[testing]")

    def pytest(self, *arguments: str | Path, cwd: Path, path: str = "") -> subprocess.CompletedProcess[str]:
        """Run an author's tests in the folder ``cwd``; ``path`` is put in front of what is installed."""
        command = (self.python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments)
        return call(*command, cwd=cwd, path=path)

    def kvferry(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        """Run the command."""
        return call(self.folder / "venv/bin/kvferry", *arguments, cwd=self.folder)


def call(*command: str | Path, cwd: Path | None = None, path: str = "") -> subprocess.CompletedProcess[str]:
    """Run a command to its end, with an import path of its own."""
    return commands.call(*command, cwd=cwd, without=("PYTEST",), environment={"PYTHONPATH": path})


def run(*command: str | Path) -> str:
    """Run a command that must succeed."""
    return commands.output_of(command, call(*command))
