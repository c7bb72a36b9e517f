"""Stand-ins for a subcommand."""

from __future__ import annotations

import argparse

from kvferry.api import Command


class NullCommand:
    """Takes no arguments, does nothing, succeeds."""

    def configure(self, parser: argparse.ArgumentParser) -> None:
        pass

    def run(self, arguments: argparse.Namespace) -> int:
        return 0


class ForwardingCommand:
    """Passes every call on to ``inner``. Override what a test wants to see or to change."""

    def __init__(self, inner: Command) -> None:
        self.inner = inner

    def configure(self, parser: argparse.ArgumentParser) -> None:
        self.inner.configure(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        return self.inner.run(arguments)
