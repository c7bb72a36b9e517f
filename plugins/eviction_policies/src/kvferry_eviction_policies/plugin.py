"""Entry module: describes, and imports no implementation."""

from __future__ import annotations

from collections.abc import Iterable

from kvferry.api import EvictionSpec, Manifest, Rule, hookimpl
from kvferry_eviction_policies.rules import RULES

MANIFEST = Manifest(
    name="eviction_policies",
    api=">=1.0,<2",
    rule_prefix="EVICT",
    summary="what goes first when a tier is full",
)


@hookimpl
def kvferry_evictions() -> Iterable[EvictionSpec]:
    return (
        EvictionSpec(
            name="lfu",
            factory="kvferry_eviction_policies.ordered:LFU",
            summary="least frequently used goes first, with dynamic ageing",
        ),
        EvictionSpec(
            name="fifo",
            factory="kvferry_eviction_policies.ordered:FIFO",
            summary="what came first goes first",
        ),
        EvictionSpec(
            name="mru",
            factory="kvferry_eviction_policies.ordered:MRU",
            summary="most recently used goes first",
        ),
        EvictionSpec(
            name="s3fifo",
            factory="kvferry_eviction_policies.s3fifo:S3FIFO",
            summary="what nobody asks for again goes first",
        ),
        EvictionSpec(
            name="isolated_lru",
            factory="kvferry_eviction_policies.isolated_lru:IsolatedLRU",
            options="kvferry_eviction_policies.options:IsolatedLRUOptions",
            quotas=True,
            summary="one least recently used list and one quota for each cache salt",
        ),
    )


@hookimpl
def kvferry_rules() -> Iterable[Rule]:
    return RULES
