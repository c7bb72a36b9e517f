"""Entry module: describes, and imports no implementation."""

from __future__ import annotations

from collections.abc import Iterable

from kvferry.api import CommandSpec, LookupSpec, Manifest, Rule, hookimpl
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
def kvferry_rules() -> Iterable[Rule]:
    return RULES
