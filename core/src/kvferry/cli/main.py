"""The ``kvferry`` command. Imports of subcommands wait until one is chosen."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from kvferry import __version__
from kvferry.api import API_VERSION, Command, ErrorKind, KVFerryError
from kvferry.cli.builtins import BUILTIN_COMMANDS, builtin_command
from kvferry.cli.host import Host
from kvferry.cli.layout import wrapped
from kvferry.cli.parser import CommandParser
from kvferry.cli.pipes import quiet_when_closed

USAGE_ERROR = 2
"""Bad arguments, an unreadable configuration or errors of the checker."""
BROKEN_PLUGIN = 4

_EPILOG = """\
Plugins may bring commands of their own, and an installed plugin that offers a command is found by the
command's name. To see its commands here, name it with --plugin NAME in front of the command, or list it
in the configuration file in KVFERRY_CONFIG.
"""


def main(arguments: Sequence[str] | None = None, host: Host | None = None) -> int:
    """Run one command and return the exit code.

    Bad arguments and ``--help`` end in ``SystemExit``, as argparse has it.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    host = host or Host()
    return quiet_when_closed(lambda: _told(words, host))


def _told(words: list[str], host: Host) -> int:
    try:
        return _run(words, host)
    except KVFerryError as error:
        print(wrapped(str(error), host.columns), file=sys.stderr)
        return BROKEN_PLUGIN if error.kind is ErrorKind.PLUGIN else USAGE_ERROR


def _run(words: list[str], host: Host) -> int:
    plugin_names, rest = _take_plugins(words)
    chosen = next((word for word in rest if not word.startswith("-")), None)
    commands: dict[str, str] = dict(BUILTIN_COMMANDS)
    loaded: dict[str, Command] = {}
    if plugin_names or (chosen is not None and chosen not in BUILTIN_COMMANDS):
        # Only now is anything of a plugin imported, and only of those that were named.
        from kvferry.cli.plugin_commands import plugin_commands

        for name, summary, command in plugin_commands(plugin_names, chosen, host):
            commands[name] = summary
            if command is not None:
                loaded[name] = command
    if chosen is not None and chosen in BUILTIN_COMMANDS:
        loaded[chosen] = builtin_command(chosen, host)
    parser = _parser(commands, loaded)
    if chosen is None and not rest:
        parser.print_help()
        return USAGE_ERROR
    parsed = parser.parse_args(rest)
    return loaded[parsed.command].run(parsed)


def _take_plugins(words: list[str]) -> tuple[list[str], list[str]]:
    """``--plugin NAME`` in front of the command, and the rest."""
    names: list[str] = []
    rest = list(words)
    while rest:
        word, equals, value = rest[0].partition("=")
        if word != "--plugin":
            break
        if equals:
            names.append(value)
            rest = rest[1:]
        elif len(rest) > 1:
            names.append(rest[1])
            rest = rest[2:]
        else:
            break
    return names, rest


def _parser(commands: dict[str, str], loaded: dict[str, Command]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvferry",
        description="Stores and moves the KV cache of LLM serving engines.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--version",
        action="version",
        version=f"kvferry {__version__} (plugin API {API_VERSION})",
    )
    parser.add_argument(
        "--plugin",
        action="append",
        metavar="NAME",
        help="offer this plugin's commands; may be given several times",
    )
    subparsers = parser.add_subparsers(
        dest="command", metavar="COMMAND", title="commands", required=True, parser_class=CommandParser
    )
    for name, summary in commands.items():
        subparser = subparsers.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        if name in loaded:
            loaded[name].configure(subparser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
