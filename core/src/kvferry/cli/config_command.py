"""``kvferry config show``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kvferry.cli.host import Host
from kvferry.cli.layout import wrapped
from kvferry.cli.output import add_format, print_json
from kvferry.cli.sources import sources_of
from kvferry.compat import ExitCode
from kvferry.config import config_data, config_text
from kvferry.runtime.examination import fault_json, fault_text
from kvferry.runtime.startup import Reading, read


class ConfigCommand:
    """Shows every value with its origin: defaults, file, environment."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def configure(self, parser: argparse.ArgumentParser) -> None:
        actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
        show = actions.add_parser("show", help="every value with its origin", allow_abbrev=False)
        show.add_argument(
            "file", nargs="?", type=Path, metavar="FILE", help="default: the one in KVFERRY_CONFIG, if any"
        )
        add_format(show)

    def run(self, arguments: argparse.Namespace) -> int:
        """0, or 2 with faults of the configuration, or 4 with a plugin that cannot be used."""
        reading = read(sources_of(arguments.file, self._host), distributions=self._host.distributions)
        if arguments.format == "json":
            faults = [*reading.config_faults, *reading.plugin_faults]
            values = None if reading.config is None else config_data(reading.config)
            print_json({"values": values, "faults": [fault_json(fault) for fault in faults]})
        else:
            _print_text(reading, self._host.columns)
        if reading.plugin_faults:
            return int(ExitCode.BROKEN_PLUGIN)
        return int(ExitCode.ERRORS if reading.config_faults else ExitCode.CLEAN)


def _print_text(reading: Reading, columns: int | None) -> None:
    if reading.config is not None:
        print(config_text(reading.config), end="")
    for label, faults in (
        ("error[config]", reading.config_faults),
        ("error[plugin]", reading.plugin_faults),
    ):
        for fault in faults:
            print(wrapped(fault_text(label, fault), columns), file=sys.stderr)
