"""The suite for channels, put to a channel that is right and to mistakes it must notice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvferry.api import (
    ChannelCapabilities,
    Connection,
    ErrorKind,
    KVFerryError,
    RemoteOp,
    RemoteRegion,
    Ticket,
    TransferStatus,
)
from kvferry.data.splitting import SplitChannel
from kvferry.plugins import LoadedPlugins, PluginRequest, load_plugins
from kvferry.testing.conformance import ChannelConformance
from kvferry.testing.fake_distributions import distributions_in, fake_distribution, importable
from kvferry.testing.faults import FaultPlan
from kvferry.testing.faulty_channel import FaultyChannel
from kvferry.testing.memory_channel import MemoryChannel, MemoryConnection

from .channel_laws import CAPABILITIES, MakeChannel, broken, over

PLUGIN = """
    from kvferry.api import ChannelCapabilities, ChannelSpec, Manifest, hookimpl

    MANIFEST = Manifest(name="memory", api=">=1.0,<2", rule_prefix="MEM", summary="for a test")

    @hookimpl
    def kvferry_channels():
        return [
            ChannelSpec(
                name="memory",
                factory="kvferry.testing.memory_channel:MemoryChannel",
                options="kvferry.testing.memory_channel:MemoryChannelOptions",
                capabilities=ChannelCapabilities(),
            )
        ]
"""


class TestMemoryChannel(ChannelConformance):
    plugin = "memory"
    channel = "memory"

    @pytest.fixture
    def plugins(self, tmp_path: Path) -> Iterator[LoadedPlugins]:
        fake_distribution(
            tmp_path, "memory", entry_points={"memory": "memory_entry"}, source={"memory_entry.py": PLUGIN}
        )
        with importable(tmp_path):
            found = load_plugins(
                [PluginRequest(name="memory")], distributions=lambda: distributions_in(tmp_path)
            )
            found.raise_for_faults()
            yield found


class FewOperations(MemoryChannel):
    """Takes three operations at once."""

    def _submit(
        self, verb: str, connection: Connection, operations: Sequence[RemoteOp], deadline: float
    ) -> Ticket[TransferStatus]:
        assert len(operations) <= 3
        return super()._submit(verb, connection, operations, deadline)


class OneWay(MemoryChannel):
    """Lacks one of the two verbs."""

    lacks = "write"

    def _submit(self, verb: str, *arguments: Any) -> Ticket[TransferStatus]:
        if verb == self.lacks:
            raise KVFerryError(f"this channel cannot {verb}", kind=ErrorKind.UNSUPPORTED)
        return super()._submit(verb, *arguments)


class OtherWay(OneWay):
    lacks = "read"


class SeesWhatWasThere(MemoryChannel):
    """A connection is to the regions that were registered before it was made, on both sides."""

    def connect(self, peer: bytes, deadline: float) -> MemoryConnection:
        found = super().connect(peer, deadline)
        return AsItWas(self, found.peer)


class AsItWas(MemoryConnection):
    def __init__(self, owner: MemoryChannel, peer: MemoryChannel) -> None:
        super().__init__(owner, peer)
        self.known = super().regions()

    def regions(self) -> Mapping[str, RemoteRegion]:
        return {name: region for name, region in super().regions().items() if name in self.known}


@pytest.mark.parametrize(
    ("make_channel", "capabilities"),
    [
        pytest.param(over(MemoryChannel), CAPABILITIES, id="a-limit-of-bytes"),
        pytest.param(over(FewOperations), ChannelCapabilities(max_ops=3), id="three-operations"),
        pytest.param(over(OneWay), ChannelCapabilities(write=False), id="reads"),
        pytest.param(over(OtherWay), ChannelCapabilities(read=False), id="writes"),
        pytest.param(
            over(SeesWhatWasThere), ChannelCapabilities(register_before_connect=True), id="regions-first"
        ),
        pytest.param(over(MemoryChannel), ChannelCapabilities(reconnect=False), id="no-reconnect"),
    ],
)
def test_laws_ask_for_no_more_than_is_claimed(
    make_channel: MakeChannel, capabilities: ChannelCapabilities
) -> None:
    assert broken(make_channel, capabilities=capabilities) == {}


def test_a_channel_that_is_split_keeps_every_law_without_a_limit() -> None:
    make = over(FewOperations)
    assert (
        broken(lambda: SplitChannel(make(), 3), also={"test_any_operations_act_like_slices_of_byte_arrays"})
        == {}
    )


def test_a_faulty_channel_without_faults_keeps_every_law() -> None:
    make = over(MemoryChannel)
    assert broken(lambda: FaultyChannel(make(), FaultPlan())) == {}
