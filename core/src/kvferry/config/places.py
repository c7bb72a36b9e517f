"""What follows from several keys together, as facts: where each tier stands, what memory sharing takes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from attrs import evolve

from kvferry.api import Fact
from kvferry.config.nodes import DEFAULT

LOWER_TIER_KEYS = (
    "store",
    "in_flight",
    "load_deadline",
    "store_deadline",
    "min_load_tokens",
    "retry_after",
)
"""Keys of a tier that say how chunks travel between it and the first tier. On the first they do nothing."""

FIRST_TIER_KEYS = ("max_pinned",)
"""Keys about pins, which are the first tier's. On others they do nothing."""


def place_facts(tiers: Iterable[str], facts: Mapping[str, Fact]) -> Iterator[Fact]:
    """For each tier, fast to slow: whether it is the first, and which of its keys do nothing there.

    ``facts`` are those of the tiers' own keys.
    """
    for number, tier in enumerate(tiers):
        front = number == 0
        stands = facts[f"tiers.{tier}.use"].origin
        own = [facts[f"tiers.{tier}.{key}"] for key in (LOWER_TIER_KEYS if front else FIRST_TIER_KEYS)]
        idle = [fact for fact in own if fact.origin != str(DEFAULT)]
        yield Fact(path=f"tiers.{tier}.place.front", value=front, origin=stands)
        yield Fact(
            path=f"tiers.{tier}.place.idle_keys",
            value=tuple(fact.path.rpartition(".")[2] for fact in idle),
            origin=", ".join(dict.fromkeys(fact.origin for fact in idle)) or stands,
        )


def sharing_facts(facts: Mapping[str, Fact]) -> Iterator[Fact]:
    """Memory per worker beside the tiers: the arena of a staging, and buffers that reads from peers land in.

    ``facts`` are those of the keys. What is not used takes no memory, and gives no fact.
    """
    staged = facts["staging.use"].value is not None
    if staged:
        yield evolve(facts["staging.capacity"], path="sharing.staging.host_bytes")
    if facts["p2p.use"].value is not None and (staged or facts["p2p.delay"].value):
        yield evolve(facts["p2p.buffer"], path="sharing.landing.host_bytes")
