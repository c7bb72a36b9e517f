"""The policies under test, by name, each with its reference."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping
from typing import Any

from kvferry.api import UNLIMITED, ByteLimit, EvictionPolicy
from kvferry.plugins import LoadedPlugins, PluginRequest, load_plugins
from kvferry_eviction_policies.options import IsolatedLRUOptions
from plugins.eviction_policies.tests.reference_policies import (
    Reference,
    ReferenceFIFO,
    ReferenceIsolatedLRU,
    ReferenceLFU,
    ReferenceLRU,
    ReferenceMRU,
    ReferenceS3FIFO,
)

QUOTAS = {"a": 3, "b": 5, "c": 0}
"""In bytes; tests let a slot be one byte. Everybody else has no limit."""


def _isolated() -> Reference:
    return ReferenceIsolatedLRU(None, dict(QUOTAS))


REFERENCES: Mapping[str, Callable[[], Reference]] = {
    "lru": ReferenceLRU,
    "lfu": ReferenceLFU,
    "fifo": ReferenceFIFO,
    "mru": ReferenceMRU,
    "s3fifo": ReferenceS3FIFO,
    "isolated_lru": _isolated,
}


@functools.cache
def loaded() -> LoadedPlugins:
    """Core and the plugin, through every gate."""
    plugins = load_plugins([PluginRequest.parse("eviction_policies")])
    assert not plugins.faults()
    return plugins


def build(name: str, options: object = None) -> Any:
    """The policy of this name, built as core builds it."""
    factory = loaded().factory("eviction", name)
    if loaded().eviction(name).options is None:
        return factory()
    limits = {owner: ByteLimit(quota) for owner, quota in QUOTAS.items()}
    return factory(options or IsolatedLRUOptions(default=UNLIMITED, quotas=limits))


def opened(name: str, entries: int) -> EvictionPolicy:
    policy: EvictionPolicy = build(name)
    policy.open(entries)
    return policy


def key(name: object) -> bytes:
    """The digest of something."""
    return hashlib.blake2b(repr(name).encode(), digest_size=32).digest()
