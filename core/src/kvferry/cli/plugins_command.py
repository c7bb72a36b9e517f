"""``kvferry plugins``."""

from __future__ import annotations

import argparse
import sys

from kvferry.cli.host import Host
from kvferry.cli.layout import wrapped
from kvferry.cli.output import add_format, plugin_json, plugins_text, print_json
from kvferry.cli.sources import add_config, sources_of
from kvferry.compat import ExitCode
from kvferry.config import read_core
from kvferry.plugins import load_plugins
from kvferry.runtime.examination import fault_text
from kvferry.runtime.startup import requests_of


class PluginsCommand:
    """Lists plugins. Imports those that the configuration lists and no others."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def configure(self, parser: argparse.ArgumentParser) -> None:
        add_config(parser)
        add_format(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        """0, or 2 when the configuration has faults, or 4 when a required plugin cannot be used."""
        raw = read_core(sources_of(arguments.config, self._host))
        plugins = load_plugins(requests_of(raw), distributions=self._host.distributions)
        if arguments.format == "json":
            print_json({"plugins": [plugin_json(record) for record in plugins.records]})
        else:
            print(wrapped(plugins_text(plugins.records), self._host.columns))
        for fault in raw.faults:
            print(wrapped(fault_text("error[config]", fault), self._host.columns), file=sys.stderr)
        if plugins.faults():
            return int(ExitCode.BROKEN_PLUGIN)
        return int(ExitCode.ERRORS if raw.faults else ExitCode.CLEAN)
