"""The parser of a command's own words."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any


class CommandParser(argparse.ArgumentParser):
    """Like argparse's own, which takes words and options in any order once :func:`mix_options` was called."""

    intermixed = False

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        if not self.intermixed:
            return super().parse_known_args(args, namespace)
        # That one calls this one, twice.
        self.intermixed = False
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self.intermixed = True


def mix_options(parser: argparse.ArgumentParser) -> None:
    """Let options stand between the words of this command; without it, only the first run of words counts."""
    if isinstance(parser, CommandParser):
        parser.intermixed = True
