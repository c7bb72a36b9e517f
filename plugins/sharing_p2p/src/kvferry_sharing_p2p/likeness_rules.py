"""P2P020 to P2P028: in what two instances must be alike before one reads the other's memory.

Two instances judge each other by these when they say hello, and whatever is violated then is a refusal: no
severity counts and no waiver. ``kvferry check`` judges files by them as far as the facts stand in files.
"""

from __future__ import annotations

from kvferry.api import (
    Check,
    Example,
    Expression,
    FactKind,
    FactSource,
    FactSpec,
    Known,
    Rule,
    Scope,
    Severity,
)
from kvferry_sharing_p2p.fleet_rules import BOTH_P2P

WIRE_VERSION_ID = "P2P020"
EPOCH_ID = "P2P021"
RANK_IDS = ("P2P027", "P2P028")
"""Of the rules that are judged once for each rank."""

FACT_SPECS = tuple(
    FactSpec(path=f"peer.{name}", kind=kind, meaning=meaning, source=FactSource.PEER)
    for name, kind, meaning in (
        ("wire_version", FactKind.COUNT, "version of the messages between instances"),
        ("epoch", FactKind.TEXT, "the life of the instance that is asked, as each side knows it"),
        ("namespace", FactKind.TEXT, "digest of model, revision and shape of the KV cache"),
        ("ranks", FactKind.COUNT, "ranks of the instance, on all its hosts"),
        ("rank", FactKind.COUNT, "the rank that is compared, from 0"),
        ("shard", FactKind.TEXT, "digest of what the rank holds of the KV cache, and how it is arranged"),
        ("slot_bytes", FactKind.SIZE, "bytes of a slot of the rank's first tier"),
    )
)


def _both(path: str) -> tuple[str, str]:
    return f"one.{path}", f"other.{path}"


def _known(path: str) -> Expression:
    one, other = _both(path)
    return Known(one) & Known(other)


def _alike(path: str, *more: str) -> Check:
    one, other = _both(path)
    return Check(f"{one} == {other}", (one, other, *more), lambda mine, theirs, *_: bool(mine == theirs))


_NOT_TWO_MODELS = Check(
    "one.model_identity and other.model_identity are not two",
    _both("model_identity"),
    lambda one, other: None in (one, other) or bool(one == other),
)
_MAY_BE_PEERS = BOTH_P2P & (~_known("model_identity") | _NOT_TWO_MODELS)
"""Instances of two models share nothing anyway."""


def _pair(path: str, one: object, other: object, **more: object) -> dict[str, object]:
    facts: dict[str, object] = {}
    for word, value in (("one", one), ("other", other)):
        facts |= {f"{word}.p2p.use": "p2p", f"{word}.{path}": value}
        facts |= {f"{word}.{name.replace('__', '.')}": fact for name, fact in more.items()}
    return facts


LIKENESS_RULES: tuple[Rule, ...] = (
    Rule(
        id=WIRE_VERSION_ID,
        severity=Severity.ERROR,
        scope=Scope.PAIR,
        waivable=False,
        when=BOTH_P2P & _known("peer.wire_version"),
        require=_alike("peer.wire_version"),
        message="the instances speak versions {one.peer.wire_version} and {other.peer.wire_version} of their "
        "messages",
        fix="install the same release of kvferry-sharing-p2p everywhere",
        source="design",
        examples=(
            Example(facts=_pair("peer.wire_version", 1, 1), passes=True),
            Example(facts=_pair("peer.wire_version", 1, 2), passes=False),
        ),
    ),
    Rule(
        id=EPOCH_ID,
        severity=Severity.ERROR,
        scope=Scope.PAIR,
        waivable=False,
        when=BOTH_P2P & _known("peer.epoch"),
        require=_alike("peer.epoch"),
        message="this is another life of the instance that is meant: it has started anew",
        fix="nothing to mend: the directory learns of the new one within seconds; if it does not end, give "
        "each instance a name of its own",
        source="design",
        examples=(
            Example(facts=_pair("peer.epoch", "4f1a", "4f1a"), passes=True),
            Example(facts=_pair("peer.epoch", "4f1a", "90c2"), passes=False),
        ),
    ),
    Rule(
        id="P2P022",
        severity=Severity.WARNING,
        scope=Scope.PAIR,
        when=BOTH_P2P & (_known("peer.namespace") | _known("model_identity")),
        require=(_known("peer.namespace") & _alike("peer.namespace"))
        | (~_known("peer.namespace") & _NOT_TWO_MODELS),
        message="the instances have different models, revisions of a model, or shapes of the KV cache, so no "
        "key of one means anything to the other",
        fix="nothing to mend if they serve different models; else start both with the same model, revision "
        "and dtype of the KV cache, and the same model_identity",
        source="design",
        examples=(
            Example(facts=_pair("peer.namespace", "6e2f", "6e2f"), passes=True),
            Example(facts=_pair("peer.namespace", "6e2f", "b701"), passes=False),
            Example(facts=_pair("model_identity", "m", None), passes=True),
            Example(facts=_pair("model_identity", "m", "n"), passes=False),
        ),
    ),
    Rule(
        id="P2P023",
        severity=Severity.ERROR,
        scope=Scope.PAIR,
        when=_MAY_BE_PEERS,
        require=_alike("chunk_tokens"),
        message="the instances cut prompts into chunks of {one.chunk_tokens} and {other.chunk_tokens} "
        "tokens, so no key of one means anything to the other",
        fix="set the same chunk_tokens in all instances",
        source="upstream-code LMCache-Ascend, which finds it out by garbage",
        examples=(
            Example(facts=_pair("chunk_tokens", 256, 256), passes=True),
            Example(facts=_pair("chunk_tokens", 256, 512), passes=False),
        ),
    ),
    Rule(
        id="P2P024",
        severity=Severity.ERROR,
        scope=Scope.PAIR,
        when=_MAY_BE_PEERS & _known("engine.block_tokens"),
        require=_alike("engine.block_tokens"),
        message="the engines have blocks of {one.engine.block_tokens} and {other.engine.block_tokens} "
        "tokens, so their slots are arranged differently",
        fix="start both engines with the same block size",
        source="design",
        examples=(
            Example(facts=_pair("engine.block_tokens", 128, 128), passes=True),
            Example(facts=_pair("engine.block_tokens", 128, 64), passes=False),
        ),
    ),
    Rule(
        id="P2P025",
        severity=Severity.ERROR,
        scope=Scope.PAIR,
        when=_MAY_BE_PEERS,
        require=_alike("channel.use"),
        message="the instances move bytes over the channels {one.channel.use} and {other.channel.use}, which "
        "do not reach each other",
        fix="set the same channel.use in all instances",
        source="design",
        examples=(
            Example(facts=_pair("channel.use", "tcp", "tcp"), passes=True),
            Example(facts=_pair("channel.use", "tcp", "local"), passes=False),
        ),
    ),
    Rule(
        id="P2P026",
        severity=Severity.ERROR,
        scope=Scope.PAIR,
        waivable=False,
        when=BOTH_P2P & _known("peer.ranks"),
        require=_alike("peer.ranks"),
        message="the instances have {one.peer.ranks} and {other.peer.ranks} ranks, and each rank reads from "
        "its like",
        fix="start both engines with the same parallel sizes",
        source="design",
        examples=(
            Example(facts=_pair("peer.ranks", 2, 2), passes=True),
            Example(facts=_pair("peer.ranks", 2, 4), passes=False),
        ),
    ),
    Rule(
        id="P2P027",
        severity=Severity.ERROR,
        scope=Scope.PAIR,
        waivable=False,
        when=BOTH_P2P & _known("peer.shard"),
        require=_alike("peer.shard", "one.peer.rank"),
        message="what rank {one.peer.rank} holds of the KV cache, or how it is arranged, is not the same in "
        "both: {one.peer.shard} and {other.peer.shard}",
        fix="start both engines with the same parallel sizes, attention backend and release",
        source="design",
        examples=(
            Example(facts=_pair("peer.shard", "a0", "a0", peer__rank=1), passes=True),
            Example(facts=_pair("peer.shard", "a0", "b1", peer__rank=1), passes=False),
        ),
    ),
    Rule(
        id="P2P028",
        severity=Severity.ERROR,
        scope=Scope.PAIR,
        waivable=False,
        when=BOTH_P2P & _known("peer.slot_bytes"),
        require=_alike("peer.slot_bytes", "one.peer.rank"),
        message="a slot of rank {one.peer.rank} has {one.peer.slot_bytes} and {other.peer.slot_bytes} bytes",
        fix="start both engines with the same block size and dtype of the KV cache, and the same release",
        source="design",
        examples=(
            Example(facts=_pair("peer.slot_bytes", 64, 64, peer__rank=0), passes=True),
            Example(facts=_pair("peer.slot_bytes", 64, 32, peer__rank=0), passes=False),
        ),
    ),
)
