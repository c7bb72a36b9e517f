"""The commands that need no plugin: their names are known without importing them."""

from __future__ import annotations

from collections.abc import Mapping

from kvferry.api import Command
from kvferry.cli.host import Host

BUILTIN_COMMANDS: Mapping[str, str] = {
    "plugins": "list installed and listed plugins with their state",
    "check": "judge configuration files: faults, plugins and compatibility rules",
    "rules": "list compatibility rules, and explain them",
    "config": "show a configuration with the origin of every value",
    "doctor": "show what kvferry finds on this machine",
    "size": "say what a model's KV cache takes, and what fits where",
    "live": "look at running instances of this host, and change them",
    "docs": "write the reference pages of configuration keys and rules",
}


def builtin_command(name: str, host: Host) -> Command:
    """The command of this name. Imports it."""
    if name == "plugins":
        from kvferry.cli.plugins_command import PluginsCommand

        return PluginsCommand(host)
    if name == "check":
        from kvferry.cli.check_command import CheckCommand

        return CheckCommand(host)
    if name == "rules":
        from kvferry.cli.rules_command import RulesCommand

        return RulesCommand(host)
    if name == "docs":
        from kvferry.cli.docs_command import DocsCommand

        return DocsCommand(host)
    if name == "config":
        from kvferry.cli.config_command import ConfigCommand

        return ConfigCommand(host)
    if name == "doctor":
        from kvferry.cli.doctor_command import DoctorCommand

        return DoctorCommand(host)
    if name == "size":
        from kvferry.cli.size_command import SizeCommand

        return SizeCommand(host)
    if name == "live":
        from kvferry.cli.live_command import LiveCommand

        return LiveCommand(host)
    raise ValueError(f"not a built-in command: {name!r}")
