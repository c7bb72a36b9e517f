"""The kit's laws, put to the local channel once for each way in which it reaches a peer's memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest

from kvferry.api import Channel, ChannelSpec
from kvferry.testing.conformance import ChannelConformance, ManifestConformance, RuleConformance
from kvferry.testing.conformance.channel_driver import Side
from kvferry.testing.conformance.channel_subject import Workbench
from kvferry_transport_local.channel import LocalChannel
from kvferry_transport_local.options import LocalOptions, Mechanism


class TestLocalManifest(ManifestConformance):
    plugin = "transport_local"


class TestLocalRules(RuleConformance):
    plugin = "transport_local"
    rule_prefix = "LOC"


def make_crossing() -> LocalChannel:
    return LocalChannel(LocalOptions(mechanism=Mechanism.CROSS_PROCESS))


class LocalLaws(ChannelConformance):
    __test__ = False
    plugin = "transport_local"
    channel = "local"
    mechanism: ClassVar[Mechanism]

    @pytest.fixture
    def options(self) -> LocalOptions:
        return LocalOptions(mechanism=self.mechanism)


class FileBench(Workbench):
    """Every side's memory lies in a memory file."""

    def open(self, *, memory_file: bool = True, **facts: Any) -> Side:
        return super().open(memory_file=True, **facts)


class TestMapped(LocalLaws):
    """Memory files are mapped. What the laws register later has none, and is read across processes; so is the
    memory of the kit's peers in other processes, which are therefore left to the other class."""

    mechanism = Mechanism.AUTO

    @pytest.fixture
    def bench(self, make_channel: Callable[[], Channel], spec: ChannelSpec) -> Iterator[Workbench]:
        bench = FileBench(make_channel, spec.capabilities, self.patience, self.grace, self.subject)
        yield bench
        bench.close_all()


class TestCrossProcess(LocalLaws):
    mechanism = Mechanism.CROSS_PROCESS
    subject = f"{__name__}:make_crossing"
