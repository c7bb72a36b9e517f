"""The commands that need no plugin: their names are known without importing them."""

from __future__ import annotations

from collections.abc import Mapping

from kvferry.api import Command
from kvferry.cli.host import Host

BUILTIN_COMMANDS: Mapping[str, str] = {
    "plugins": "list installed and listed plugins with their state",
    "check": "judge configuration files: faults, plugins and compatibility rules",
    "config": "show a configuration with the origin of every value",
    "doctor": "show what kvferry finds on this machine",
}


def builtin_command(name: str, host: Host) -> Command:
    """The command of this name. Imports it."""
    if name == "plugins":
        from kvferry.cli.plugins_command import PluginsCommand

        return PluginsCommand(host)
    if name == "check":
        from kvferry.cli.check_command import CheckCommand

        return CheckCommand(host)
    if name == "config":
        from kvferry.cli.config_command import ConfigCommand

        return ConfigCommand(host)
    if name == "doctor":
        from kvferry.cli.doctor_command import DoctorCommand

        return DoctorCommand(host)
    raise ValueError(f"not a built-in command: {name!r}")
