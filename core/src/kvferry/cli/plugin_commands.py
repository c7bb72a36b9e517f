"""Commands that plugins bring. Only plugins that were named, that the configuration lists, or whose metadata
offers the command are imported for it."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence

from kvferry.api import Command, CommandSpec, ErrorKind, KVFerryError, Retry
from kvferry.cli.builtins import BUILTIN_COMMANDS
from kvferry.cli.host import Host
from kvferry.config import ConfigSources, find_config, read_core
from kvferry.plugins import LoadedPlugins, PluginRequest, PluginState, Provided, load_plugins
from kvferry.runtime.startup import requests_of

_BY_COMMAND = "the command's name"
"""Where a plugin was asked for that nobody named or listed."""


def plugin_commands(
    names: Sequence[str], chosen: str | None, host: Host
) -> Iterator[tuple[str, str, Command | None]]:
    """``(name, summary, command)`` of every command of the plugins in question.

    Only the ``chosen`` one is built. The plugins are those in ``names``, and those that the
    configuration in ``KVFERRY_CONFIG`` lists when ``chosen`` is no built-in command. If none of them
    brings it, the one joins them that offers it in the metadata of its distribution. Raises
    :class:`KVFerryError` when one of ``names`` cannot be used, when ``chosen`` belongs to none, or when
    several offer it.
    """
    named = [PluginRequest.parse(name, origin="--plugin") for name in dict.fromkeys(names)]
    listed = [] if chosen in BUILTIN_COMMANDS else _listed(host)
    requests = [*named, *(each for each in listed if each.name not in {n.name for n in named})]
    plugins = load_plugins(requests, distributions=host.distributions)
    if chosen is not None and chosen not in BUILTIN_COMMANDS:
        offering = _offering(chosen, plugins)
        if offering is not None:
            plugins = load_plugins([*requests, offering], distributions=host.distributions)
    for record in plugins.records:
        if record.broken and record.origin in ("--plugin", _BY_COMMAND):
            raise record.as_error()
    offered: set[str] = set()
    for owned in plugins.specs("command"):
        spec = owned.spec
        if spec.name in BUILTIN_COMMANDS:
            raise KVFerryError(
                f"{owned.label} has the name of a built-in command",
                kind=ErrorKind.PLUGIN,
                remedy="report it to the plugin's author",
                retry=Retry.AFTER_CHANGE,
            )
        assert isinstance(spec, CommandSpec)
        offered.add(spec.name)
        built = plugins.factory("command", spec.name)() if spec.name == chosen else None
        yield spec.name, spec.summary, built
    if chosen is not None and chosen not in offered and chosen not in BUILTIN_COMMANDS:
        raise _unknown(chosen, offered, plugins)


def _offering(chosen: str, plugins: LoadedPlugins) -> PluginRequest | None:
    """The plugin that offers this command and was not asked for; ``None`` if one that was brings it, or
    there is none."""
    command = Provided(kind="command", name=chosen)
    if any(command in record.provides for record in plugins.records):
        return None
    owners = [
        record.name
        for record in plugins.records
        if record.state is PluginState.FOUND and command in record.offers
    ]
    if len(owners) > 1:
        raise KVFerryError(
            f"several installed plugins offer the command {chosen!r}",
            kind=ErrorKind.CONFIG,
            why=f"they are: {', '.join(owners)}",
            remedy=f"name the one that is meant: kvferry --plugin {owners[0]} {chosen}",
            retry=Retry.AFTER_CHANGE,
        )
    return PluginRequest.parse(owners[0], origin=_BY_COMMAND) if owners else None


def _listed(host: Host) -> list[PluginRequest]:
    file = find_config(host.environment, {})
    if file is None:
        return []
    sources = ConfigSources(file=file, environment=host.environment, overrides={})
    return requests_of(read_core(sources))


def _unknown(chosen: str, offered: set[str], plugins: LoadedPlugins) -> KVFerryError:
    names = ", ".join([*BUILTIN_COMMANDS, *sorted(offered)])
    broken = ", ".join(record.name for record in plugins.records if record.broken)
    near = difflib.get_close_matches(chosen, [*BUILTIN_COMMANDS, *offered], 1)
    hint = f"did you mean {near[0]!r}? Otherwise: " if near else ""
    return KVFerryError(
        f"kvferry has no command {chosen!r}",
        kind=ErrorKind.CONFIG,
        why=f"commands are: {names}" + (f"; plugins that cannot be used: {broken}" if broken else ""),
        remedy=f"{hint}a plugin's commands are offered with --plugin NAME in front of the command, or when "
        "the file in KVFERRY_CONFIG lists the plugin",
        retry=Retry.AFTER_CHANGE,
    )
