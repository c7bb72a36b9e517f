"""The kit's laws, put to the TCP channel."""

from __future__ import annotations

from kvferry.testing.conformance import ChannelConformance, ManifestConformance, RuleConformance
from kvferry_transport_tcp.channel import TCPChannel
from kvferry_transport_tcp.options import TCPOptions


def make() -> TCPChannel:
    """The channel with its defaults, for peers in processes of their own."""
    return TCPChannel(TCPOptions())


class TestTCPManifest(ManifestConformance):
    plugin = "transport_tcp"


class TestTCPRules(RuleConformance):
    plugin = "transport_tcp"
    rule_prefix = "TCP"


class TestTCP(ChannelConformance):
    plugin = "transport_tcp"
    channel = "tcp"
    subject = "plugins.transport_tcp.tests.test_tcp_conformance:make"
