"""Entry module: describes, and imports no implementation."""

from __future__ import annotations

from collections.abc import Iterable

from kvferry.api import CommandSpec, FactSpec, LookupSpec, Manifest, Rule, SourceSpec, hookimpl
from kvferry_sharing_p2p.likeness_rules import FACT_SPECS
from kvferry_sharing_p2p.rules import RULES

MANIFEST = Manifest(
    name="sharing_p2p",
    api=">=1.0,<2",
    rule_prefix="P2P",
    summary="instances reuse what others have computed",
)


@hookimpl
def kvferry_commands() -> Iterable[CommandSpec]:
    return (
        CommandSpec(
            name="controller",
            factory="kvferry_sharing_p2p.controller.command:ControllerCommand",
            summary="run the directory of who has which chunks, or ask a running one how it stands",
        ),
    )


@hookimpl
def kvferry_lookups() -> Iterable[LookupSpec]:
    return (
        LookupSpec(
            name="controller",
            factory="kvferry_sharing_p2p.network.lookup:controller_lookup",
            options="kvferry_sharing_p2p.network.options:ControllerOptions",
            summary="the directory that 'kvferry controller' runs",
        ),
    )


@hookimpl
def kvferry_sources() -> Iterable[SourceSpec]:
    return (
        SourceSpec(
            name="p2p",
            factory="kvferry_sharing_p2p.peers.opening:make_carrier",
            options="kvferry_sharing_p2p.peers.options:P2POptions",
            summary="chunks out of the memory of other instances",
        ),
    )


@hookimpl
def kvferry_fact_specs() -> Iterable[FactSpec]:
    return FACT_SPECS


@hookimpl
def kvferry_rules() -> Iterable[Rule]:
    return RULES
