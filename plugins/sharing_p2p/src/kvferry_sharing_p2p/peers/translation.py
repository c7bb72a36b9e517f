"""Between the contract's words and messages."""

from __future__ import annotations

import math

from kvferry.api import (
    DIGEST_BYTES,
    Answer,
    Grant,
    LentChunk,
    PeerAsk,
    PeerCard,
    PeerId,
    RankCard,
    Refused,
)
from kvferry_sharing_p2p.peers.messages import Ask, Card, Declined, Granted, Lent, Rank


def ask_message(ask: PeerAsk) -> Ask:
    return Ask(
        number=ask.number,
        keys=b"".join(ask.keys),
        tails=ask.tails,
        skip=ask.skip,
        limit_tokens=ask.limit_tokens,
    )


def ask_of(message: Ask) -> PeerAsk:
    ends = range(DIGEST_BYTES, len(message.keys) + 1, DIGEST_BYTES)
    return PeerAsk(
        number=message.number,
        keys=tuple(message.keys[end - DIGEST_BYTES : end] for end in ends),
        tails=message.tails,
        skip=message.skip,
        limit_tokens=message.limit_tokens,
    )


def answer_message(answer: Answer) -> Granted | Declined:
    if isinstance(answer, Refused):
        return Declined(number=answer.number, reason=answer.reason)
    return Granted(
        number=answer.number,
        chunks=tuple(
            Lent(
                chunk.digest,
                chunk.parent,
                chunk.depth,
                chunk.tokens,
                chunk.aliases,
                chunk.model,
                None if math.isinf(chunk.seconds) else chunk.seconds,
                slot,
            )
            for chunk, slot in zip(answer.chunks, answer.slots, strict=True)
        ),
        tokens=answer.tokens,
        seconds=answer.seconds,
        region=answer.region,
    )


def answer_of(message: Granted | Declined) -> Answer:
    if isinstance(message, Declined):
        return Refused(message.number, message.reason)
    return Grant(
        number=message.number,
        chunks=tuple(
            LentChunk(
                digest=each.digest,
                parent=each.parent,
                depth=each.depth,
                tokens=each.tokens,
                aliases=each.aliases,
                model=each.model,
                seconds=math.inf if each.seconds is None else each.seconds,
            )
            for each in message.chunks
        ),
        slots=tuple(each.slot for each in message.chunks),
        tokens=message.tokens,
        seconds=message.seconds,
        region=message.region,
    )


def card_message(card: PeerCard) -> Card:
    return Card(
        card.id.instance,
        card.id.epoch,
        card.namespace,
        card.chunk_tokens,
        card.block_tokens,
        card.channel,
        tuple(Rank(rank.shard, rank.slot_bytes, rank.export) for rank in card.ranks),
    )


def card_of(message: Card) -> PeerCard:
    return PeerCard(
        id=PeerId(message.instance, message.epoch),
        namespace=message.namespace,
        chunk_tokens=message.chunk_tokens,
        block_tokens=message.block_tokens,
        channel=message.channel,
        ranks=tuple(
            RankCard(shard=rank.shard, slot_bytes=rank.slot_bytes, export=rank.export)
            for rank in message.ranks
        ),
    )
