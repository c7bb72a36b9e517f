"""Entry module: describes, and imports no implementation."""

from __future__ import annotations

from collections.abc import Iterable

from kvferry.api import ChannelCapabilities, ChannelSpec, Manifest, Rule, hookimpl
from kvferry_transport_tcp.rules import RULES

MANIFEST = Manifest(
    name="transport_tcp",
    api=">=1.0,<2",
    rule_prefix="TCP",
    summary="a channel over TCP, which reaches any host",
)


@hookimpl
def kvferry_channels() -> Iterable[ChannelSpec]:
    return (
        ChannelSpec(
            name="tcp",
            factory="kvferry_transport_tcp.channel:TCPChannel",
            options="kvferry_transport_tcp.options:TCPOptions",
            capabilities=ChannelCapabilities(),
            summary="several TCP connections to each peer, straight into memory",
        ),
    )


@hookimpl
def kvferry_rules() -> Iterable[Rule]:
    return RULES
