"""In what two instances must be alike before one reads the other's memory."""

from __future__ import annotations

from kvferry.api import PeerCard


def difference(one: PeerCard, other: PeerCard) -> str:
    """The first thing in which they differ and must not, with both values; empty if there is none."""
    for what, ours, theirs in (
        ("model, revision or shape of the KV cache", one.namespace.hex(), other.namespace.hex()),
        ("tokens of a chunk", one.chunk_tokens, other.chunk_tokens),
        ("tokens of a block", one.block_tokens, other.block_tokens),
        ("channel", one.channel, other.channel),
        ("number of ranks", len(one.ranks), len(other.ranks)),
        *(
            row
            for rank, (mine, its) in enumerate(zip(one.ranks, other.ranks, strict=False))
            for row in (
                (f"share and layout of rank {rank}", mine.shard.hex(), its.shard.hex()),
                (f"bytes of a slot of rank {rank}", mine.slot_bytes, its.slot_bytes),
            )
        ),
    ):
        if ours != theirs:
            return f"{what}: {ours} and {theirs}"
    return ""
