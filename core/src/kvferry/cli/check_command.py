"""``kvferry check``."""

from __future__ import annotations

import argparse
from pathlib import Path

from kvferry.cli.host import Host
from kvferry.cli.output import add_format, print_json
from kvferry.cli.sources import environment_of, sources_of
from kvferry.compat import ExitCode
from kvferry.runtime.startup import examine

_EPILOG = """\
exit codes:
  0  clean
  1  warnings, with --strict
  2  errors
  3  error rules that could not be verified
  4  a listed plugin cannot be used
"""


class CheckCommand:
    """Judges files as an engine start would, on this machine and without an engine."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.epilog = _EPILOG
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
        parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
        parser.add_argument("--strict", action="store_true", help="warnings count")
        add_format(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        """The code that says most of all files."""
        strict: bool = arguments.strict
        examinations = [
            examine(
                sources_of(file, self._host),
                environment_of(self._host),
                distributions=self._host.distributions,
            )
            for file in arguments.files
        ]
        code = ExitCode.worst(*(each.exit_code(strict=strict) for each in examinations))
        if arguments.format == "json":
            files = [each.to_json(strict=strict) for each in examinations]
            print_json({"exit_code": int(code), "files": files})
        else:
            print("\n\n".join(each.text() for each in examinations))
        return int(code)
