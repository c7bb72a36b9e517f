"""``kvferry check``."""

from __future__ import annotations

import argparse
from pathlib import Path

from kvferry.cli.host import Host
from kvferry.cli.output import add_format, print_json
from kvferry.cli.sources import environment_of, sources_of
from kvferry.runtime.together import examine_together

_EPILOG = """\
Several files are judged one by one, then as instances that run on one host together.

exit codes:
  0  clean
  1  warnings, with --strict
  2  errors
  3  error rules that could not be verified
  4  a listed plugin cannot be used
"""


class CheckCommand:
    """Judges files as an engine start would, without an engine, on this machine or for another one."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.epilog = _EPILOG
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
        parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
        parser.add_argument("--strict", action="store_true", help="warnings count")
        parser.add_argument(
            "--facts",
            type=Path,
            metavar="FACTS",
            help="judge for the host that this file describes (from 'kvferry doctor --format facts')",
        )
        add_format(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        """The code that says most of all files."""
        strict: bool = arguments.strict
        found = examine_together(
            [sources_of(file, self._host) for file in arguments.files],
            environment_of(self._host),
            arguments.facts,
            distributions=self._host.distributions,
        )
        if arguments.format == "json":
            print_json(found.to_json(strict=strict))
        else:
            print(found.text())
        return int(found.exit_code(strict=strict))
