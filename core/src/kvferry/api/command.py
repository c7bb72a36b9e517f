"""Subcommands of ``kvferry``."""

from __future__ import annotations

import argparse
from typing import Protocol


class Command(Protocol):
    """One subcommand. Built without arguments."""

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add arguments."""
        ...

    def run(self, arguments: argparse.Namespace) -> int:
        """Do the work, print to standard output, return the exit code."""
        ...
