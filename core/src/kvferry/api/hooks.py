"""Hook specifications. Cold path only: a hook returns descriptions, and objects do the work."""

from __future__ import annotations

from collections.abc import Iterable

import pluggy

from kvferry.api.facts import FactSpec
from kvferry.api.rules import Fact, Rule
from kvferry.api.specs import (
    BackendSpec,
    ChannelSpec,
    CommandSpec,
    ConnectorSpec,
    DeviceSpec,
    EvictionSpec,
    HostEnvironment,
    LookupSpec,
    SourceSpec,
    StagingSpec,
)

PROJECT = "kvferry"
ENTRY_POINT_GROUP = "kvferry.plugins"
OFFER_GROUP = "kvferry.offers"
"""Entry points ``kind.name = plugin``: what a plugin provides, told without an import, so that a
configuration which wants it can be told which plugin to list."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class KVFerryHooks:
    """Every hook. All collect; none is ``firstresult``; each is called plugin by plugin, so that a
    result keeps its owner and a failure stays local."""

    @hookspec
    def kvferry_backends(self) -> Iterable[BackendSpec]:
        """Data halves of tiers."""
        return ()

    @hookspec
    def kvferry_channels(self) -> Iterable[ChannelSpec]:
        """Channels."""
        return ()

    @hookspec
    def kvferry_lookups(self) -> Iterable[LookupSpec]:
        """Directory services."""
        return ()

    @hookspec
    def kvferry_evictions(self) -> Iterable[EvictionSpec]:
        """Eviction policies."""
        return ()

    @hookspec
    def kvferry_stagings(self) -> Iterable[StagingSpec]:
        """Staging arenas."""
        return ()

    @hookspec
    def kvferry_sources(self) -> Iterable[SourceSpec]:
        """Places outside the instance that chunks come from."""
        return ()

    @hookspec
    def kvferry_connectors(self) -> Iterable[ConnectorSpec]:
        """Host integrations."""
        return ()

    @hookspec
    def kvferry_devices(self) -> Iterable[DeviceSpec]:
        """Accelerators."""
        return ()

    @hookspec
    def kvferry_facts(self, env: HostEnvironment) -> Iterable[Fact]:
        """Facts about this host: library versions, devices, limits."""
        return ()

    @hookspec
    def kvferry_fact_specs(self) -> Iterable[FactSpec]:
        """What the facts mean that this plugin gives, or lets its engine give."""
        return ()

    @hookspec
    def kvferry_rules(self) -> Iterable[Rule]:
        """Compatibility rules as data."""
        return ()

    @hookspec
    def kvferry_commands(self) -> Iterable[CommandSpec]:
        """Subcommands of ``kvferry``."""
        return ()
