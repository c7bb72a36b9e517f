"""``kvferry config show``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kvferry.cli.host import Host
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
        show.add_argument("file", type=Path, metavar="FILE")
        add_format(show)

    def run(self, arguments: argparse.Namespace) -> int:
        """0, or 2 with faults of the configuration, or 4 with a plugin that cannot be used."""
        reading = read(sources_of(arguments.file, self._host), distributions=self._host.distributions)
        if arguments.format == "json":
            faults = [*reading.config_faults, *reading.plugin_faults]
            values = None if reading.config is None else config_data(reading.config)
            print_json({"values": values, "faults": [fault_json(fault) for fault in faults]})
        else:
            _print_text(reading)
        if reading.plugin_faults:
            return int(ExitCode.BROKEN_PLUGIN)
        return int(ExitCode.ERRORS if reading.config_faults else ExitCode.CLEAN)


def _print_text(reading: Reading) -> None:
    if reading.config is not None:
        print(config_text(reading.config), end="")
    for label, faults in (
        ("error[config]", reading.config_faults),
        ("error[plugin]", reading.plugin_faults),
    ):
        for fault in faults:
            print(fault_text(label, fault), file=sys.stderr)
