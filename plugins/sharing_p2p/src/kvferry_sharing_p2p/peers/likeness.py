"""Two instances judged by the rules of likeness, before one reads the other's memory."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from attrs import frozen

from kvferry.api import Fact, PeerCard, Rule, Truth
from kvferry_sharing_p2p.likeness_rules import EPOCH_ID, LIKENESS_RULES, RANK_IDS, WIRE_VERSION_ID

_SHOWN_DIGITS = 16
_PLACEHOLDER = re.compile(r"\{([^{}:]+)\}")
_RANK_RULES = tuple(rule for rule in LIKENESS_RULES if rule.id in RANK_IDS)
_INSTANCE_RULES = tuple(
    rule for rule in LIKENESS_RULES if rule.id not in (*RANK_IDS, EPOCH_ID, WIRE_VERSION_ID)
)
_EPOCH_RULES = tuple(rule for rule in LIKENESS_RULES if rule.id == EPOCH_ID)


@frozen
class Unlike:
    """What two instances differ in and must not. ``rule`` is its id, empty where none is
    known; ``reason`` one sentence."""

    rule: str
    reason: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.reason}" if self.rule else self.reason


def difference(one: PeerCard, other: PeerCard) -> Unlike | None:
    """The first rule that is violated between two; ``None`` if they are alike."""
    unlike = _judge(_INSTANCE_RULES, _instance(one), _instance(other))
    for rank, (mine, theirs) in enumerate(zip(one.ranks, other.ranks, strict=False)):
        if unlike is not None:
            break
        unlike = _judge(
            _RANK_RULES,
            {"peer.rank": rank, "peer.shard": mine.shard.hex(), "peer.slot_bytes": mine.slot_bytes},
            {"peer.rank": rank, "peer.shard": theirs.shard.hex(), "peer.slot_bytes": theirs.slot_bytes},
        )
    return unlike


def another_life(meant: bytes, here: bytes) -> Unlike | None:
    """Whether the instance that is meant is the one that is here, by their epochs."""
    return _judge(_EPOCH_RULES, {"peer.epoch": meant.hex()}, {"peer.epoch": here.hex()})


def _instance(card: PeerCard) -> dict[str, object]:
    return {
        "peer.namespace": card.namespace.hex(),
        "chunk_tokens": card.chunk_tokens,
        "engine.block_tokens": card.block_tokens,
        "channel.use": card.channel,
        "peer.ranks": len(card.ranks),
    }


def _judge(rules: Iterable[Rule], one: Mapping[str, object], other: Mapping[str, object]) -> Unlike | None:
    facts: dict[str, Fact] = {}
    for word, values in (("one", one), ("other", other)):
        for path, value in (("p2p.use", "p2p"), *values.items()):
            name = f"{word}.{path}"
            facts[name] = Fact(path=name, value=value, origin="hello")
    for rule in rules:
        # What cannot be judged is not alike: the facts of a hello are complete.
        if not (rule.when.evaluate(facts) is Truth.TRUE and rule.require.evaluate(facts) is Truth.TRUE):
            return Unlike(rule.id, _filled(rule.message, facts))
    return None


def _filled(text: str, facts: Mapping[str, Fact]) -> str:
    def value(match: re.Match[str]) -> str:
        shown = str(facts[match[1]].value)
        return shown if len(shown) <= _SHOWN_DIGITS else f"{shown[:_SHOWN_DIGITS]}..."

    return _PLACEHOLDER.sub(value, text)
