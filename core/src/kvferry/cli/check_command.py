"""``kvferry check``."""

from __future__ import annotations

import argparse
from pathlib import Path

from kvferry.cli.host import Host
from kvferry.cli.layout import wrapped
from kvferry.cli.output import add_format, print_json
from kvferry.cli.parser import mix_options
from kvferry.cli.sources import environment_of, sources_of_all
from kvferry.runtime.together import examine_together

_EPILOG = """\
Several files are judged one by one, then as instances that run on one host together.
With --facts nothing of this machine counts: neither what it is nor its KVFERRY__ variables.

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
        mix_options(parser)
        parser.add_argument(
            "files", nargs="+", type=Path, metavar="FILE", help="a configuration; - reads standard input"
        )
        parser.add_argument("--strict", action="store_true", help="warnings count")
        parser.add_argument(
            "--facts",
            type=Path,
            metavar="FACTS",
            help="judge for the host that this file describes (from 'kvferry doctor --format facts')",
        )
        parser.add_argument(
            "--with-environment",
            action="store_true",
            help="with --facts: count the KVFERRY__ variables that are set here, too",
        )
        add_format(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        """The code that says most of all files."""
        strict: bool = arguments.strict
        found = examine_together(
            sources_of_all(arguments.files, self._host),
            environment_of(self._host),
            arguments.facts,
            with_environment=arguments.with_environment,
            distributions=self._host.distributions,
        )
        if arguments.format == "json":
            print_json(found.to_json(strict=strict))
        else:
            print(wrapped(found.text(), self._host.columns))
        return int(found.exit_code(strict=strict))
