"""Suites by which an author proves a plugin. The guides are ``docs/write-a-backend.md`` and
``docs/write-a-channel.md``."""

from kvferry.testing.conformance.addressable import AddressableBackendConformance
from kvferry.testing.conformance.base import Conformance, needs
from kvferry.testing.conformance.channel import ChannelConformance
from kvferry.testing.conformance.eviction import EvictionConformance
from kvferry.testing.conformance.keyed import BackendConformance
from kvferry.testing.conformance.manifest import ManifestConformance
from kvferry.testing.conformance.raw import RawStore
from kvferry.testing.conformance.rules import RuleConformance
from kvferry.testing.conformance.staging import StagingConformance

__all__ = [
    "AddressableBackendConformance",
    "BackendConformance",
    "ChannelConformance",
    "Conformance",
    "EvictionConformance",
    "ManifestConformance",
    "RawStore",
    "RuleConformance",
    "StagingConformance",
    "needs",
]
