"""What every chunk must hold: a tree of texts, their keys, and the right bytes for each block."""

from __future__ import annotations

import hashlib
from random import Random

from attrs import define, field, frozen

from kvferry.api import GroupGeometry, KVGeometry
from kvferry.control.chain_cache import ChainCache
from kvferry.control.identity import LoRAIdentity, Namespace
from kvferry.control.keys import KeyChain
from kvferry.control.outcomes import ChunkWrite

BLOCK = 2
CHUNK_BLOCKS = 3
CHUNK = BLOCK * CHUNK_BLOCKS
DOCUMENTS, BRANCHES, DEPTH = 3, 2, 4

SALTS = ("", "", "", "red", "blue")
LORAS = (
    None,
    None,
    None,
    LoRAIdentity(name="poet", version="1"),
    LoRAIdentity(name="poet", version="2"),
)
GARBAGE = -1
"""What is in memory that nobody wrote, or that somebody wrote wrongly."""


@frozen
class Identity:
    """Who asks, and with which adapter."""

    salt: str
    lora: LoRAIdentity | None


@define(eq=False)
class Text:
    """A path through the tree, under one identity. Prompts and answers are its beginnings.

    ``blocks[i]`` stands for the bytes of block ``i``, ``tails[c]`` are digests of beginnings of chunk ``c``.
    """

    name: str
    identity: Identity
    tokens: tuple[int, ...]
    keys: tuple[bytes, ...]
    tails: tuple[tuple[tuple[bytes, int], ...], ...]
    blocks: tuple[int, ...]

    def tail_keys(self, chunk: int, tokens: int) -> list[tuple[bytes, int]]:
        """What a chain that holds ``tokens`` tokens answers."""
        return [tail for tail in self.tails[chunk] if chunk * CHUNK + tail[1] <= tokens]

    def write(self, chunk: int, tokens: int) -> ChunkWrite:
        """The first ``tokens`` tokens of a chunk as something to store."""
        aliases = tuple(tail for tail in self.tails[chunk] if tail[1] < tokens)
        digest = self.keys[chunk] if tokens == CHUNK else dict(map(reversed, self.tails[chunk]))[tokens]
        return ChunkWrite(digest, self.keys[chunk - 1] if chunk else None, chunk, tokens, aliases)


class Truth:
    """The texts of one simulation. Knows the right blocks for every digest that was ever made.

    ``weights`` grows when the model's weights change: from then on the same digest stands for other
    bytes. Ranks hold different bytes for one block.
    """

    def __init__(self, random: Random) -> None:
        group = GroupGeometry(kind="full", layers=1, kv_heads=1, head_size=8, dtype="bfloat16")
        geometry = KVGeometry(groups=(group,), chunk_tokens=CHUNK)
        self.weights = 0
        self._namespace = Namespace(model="simulated", revision="1", geometry=geometry)
        self._cache = ChainCache(1 << 20)
        self._segments: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._texts: dict[tuple[Identity, tuple[int, ...]], Text] = {}
        self._right: dict[bytes, tuple[int, ...]] = {}
        for document in range(DOCUMENTS):
            self._grow(random, (document,))

    def _grow(self, random: Random, path: tuple[int, ...]) -> None:
        length = random.randrange(4, 12)
        self._segments[path] = tuple(random.randrange(1000) for _ in range(length))
        if len(path) <= DEPTH:
            for branch in range(BRANCHES):
                self._grow(random, (*path, branch))

    def draw(self, random: Random) -> Text:
        """A text, popular ones more often."""
        path = tuple(
            min(random.randrange(count), random.randrange(count))
            for count in (DOCUMENTS, *[BRANCHES] * DEPTH)
        )
        return self.text(Identity(random.choice(SALTS), random.choice(LORAS)), path)

    def text(self, identity: Identity, path: tuple[int, ...]) -> Text:
        known = self._texts.get((identity, path))
        if known is None:
            known = self._texts[identity, path] = self._make(identity, path)
        return known

    def new_chain(self, identity: Identity) -> KeyChain:
        """An empty chain, as a scheduler makes one for each request."""
        return KeyChain(self._namespace, salt=identity.salt, lora=identity.lora, cache=self._cache)

    def _make(self, identity: Identity, path: tuple[int, ...]) -> Text:
        tokens = tuple(token for end in range(len(path)) for token in self._segments[path[: end + 1]])
        chain = self.new_chain(identity)
        chain.extend(tokens)
        tails = tuple(tuple(chain.tail_keys(chunk, BLOCK)) for chunk in range(len(chain.keys) + 1))
        # Derived from what the model computes from, not from the keys that are to be tested.
        blocks = []
        state = repr(identity).encode()
        for end in range(BLOCK, len(tokens) + 1, BLOCK):
            state = hashlib.blake2b(state + repr(tokens[end - BLOCK : end]).encode(), digest_size=7).digest()
            blocks.append(int.from_bytes(state, "big"))
        for chunk, digest in enumerate(chain.keys):
            self._learn(digest, blocks[chunk * CHUNK_BLOCKS : (chunk + 1) * CHUNK_BLOCKS])
        for chunk, pairs in enumerate(tails):
            for digest, held in pairs:
                first = chunk * CHUNK_BLOCKS
                self._learn(digest, blocks[first : first + held // BLOCK])
        name = "".join(map(str, path))
        return Text(name, identity, tokens, tuple(chain.keys), tails, tuple(blocks))

    def _learn(self, digest: bytes, blocks: list[int]) -> None:
        assert self._right.setdefault(digest, tuple(blocks)) == tuple(blocks), "one digest, two contents"

    def right(self, digest: bytes) -> tuple[int, ...]:
        """The blocks that a chunk with this digest begins with, before rank and weights."""
        return self._right[digest]

    def digests(self) -> list[bytes]:
        """All that were ever made, in the order of their making."""
        return list(self._right)


def stored(block: int, rank: int, weights: int) -> int:
    """What the memory of a rank holds for a block that was computed with certain weights."""
    return block * 64 + rank * 8 + weights % 8


def chunks_of(tokens: int) -> int:
    return -(-tokens // CHUNK)


@define
class Numbers:
    """Names that are never used twice."""

    last: int = field(default=0)

    def next(self) -> int:
        self.last += 1
        return self.last
