"""Entry module: describes, and imports no implementation."""

from __future__ import annotations

from collections.abc import Iterable

from kvferry.api import (
    ChannelCapabilities,
    ChannelSpec,
    Fact,
    FactSpec,
    HostEnvironment,
    Manifest,
    Rule,
    hookimpl,
)
from kvferry_transport_local.facts import FACT_SPECS, probe_facts
from kvferry_transport_local.rules import RULES

MANIFEST = Manifest(
    name="transport_local",
    api=">=1.0,<2",
    rule_prefix="LOC",
    summary="a channel between processes of one host",
)


@hookimpl
def kvferry_channels() -> Iterable[ChannelSpec]:
    return (
        ChannelSpec(
            name="local",
            factory="kvferry_transport_local.channel:LocalChannel",
            options="kvferry_transport_local.options:LocalOptions",
            capabilities=ChannelCapabilities(same_host=True),
            summary="mapped memory files, and reads across processes",
        ),
    )


@hookimpl
def kvferry_facts(env: HostEnvironment) -> Iterable[Fact]:
    return tuple(probe_facts(env))


@hookimpl
def kvferry_fact_specs() -> Iterable[FactSpec]:
    return FACT_SPECS


@hookimpl
def kvferry_rules() -> Iterable[Rule]:
    return RULES
