"""Paged KV memory whose every cell is known: right content is a function of the tokens alone."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np
from attrs import field, frozen
from numpy.typing import NDArray

from kvferry.data.engine_side import EngineGroup, PagePlane
from kvferry.runtime.grain import GroupShape

Histories = NDArray[np.uint64]
"""One number per token that stands for the token and everything before it."""

_MASK = (1 << 64) - 1
_MIX = 0x9E3779B97F4A7C15
_SPREAD = np.uint64(0xD6E8FEB86659FD93)
_SHIFT = np.uint64(56)
_POISON = 0xA5
_GAP = 0x5A


class TokenHistory:
    """The tokens of one request as a model would go on from its prompt, and the history of each.

    ``tenant`` enters the history, so that KV cache which crosses tenants has wrong bytes. What comes
    after the prompt depends on the history alone, as with a model that samples greedily.
    """

    def __init__(self, prompt: Sequence[int], tenant: str, vocabulary: int = 50_000) -> None:
        self._vocabulary = vocabulary
        self._tokens = list(prompt)
        state = _MIX
        for byte in tenant.encode():
            state = _step(state, byte + 1)
        self._root = state
        self._states: list[int] = []

    def tokens(self, count: int) -> list[int]:
        """The first ``count`` tokens of prompt and answer."""
        self._grow(count)
        return self._tokens[:count]

    def states(self, first: int, last: int) -> Histories:
        """Histories of the tokens from ``first`` up to ``last``."""
        self._grow(last)
        return np.array(self._states[first:last], np.uint64)

    def state(self, count: int) -> int:
        """One number for the first ``count`` tokens."""
        self._grow(count)
        return self._states[count - 1] if count else self._root

    def _grow(self, count: int) -> None:
        while len(self._tokens) < count or len(self._states) < count:
            at = len(self._states)
            if at == len(self._tokens):
                self._tokens.append((self._states[-1] >> 20) % self._vocabulary)
            before = self._states[-1] if at else self._root
            self._states.append(_step(before, self._tokens[at] + 0x101))


def _step(state: int, token: int) -> int:
    mixed = ((state ^ token) * _MIX) & _MASK
    return mixed ^ (mixed >> 29)


@frozen(kw_only=True)
class FakeGroup:
    """One KV cache group of a fake engine, on one rank.

    ``fused`` pages hold K and V of a layer side by side: (blocks, heads, block tokens, 2 x head
    bytes). Otherwise K and V are planes of their own. A ``latent`` has neither K and V nor heads, like
    MLA's. ``gap`` bytes lie between pages. ``block_tokens`` are the engine's, unless the group has its
    own; tokens attend to ``window`` tokens, or to all.
    """

    layers: int = 2
    heads: int = 2
    head_bytes: int = 4
    fused: bool = True
    gap: int = 0
    latent: bool = False
    window: int | None = None
    block_tokens: int | None = None

    def __attrs_post_init__(self) -> None:
        if self.latent and self.heads != 1:
            raise ValueError(f"a latent has one head, not {self.heads}")

    @property
    def kind(self) -> str:
        if self.window is not None:
            return "sliding"
        return "mla" if self.latent else "full"

    @property
    def planes(self) -> int:
        return self.layers if self.fused or self.latent else 2 * self.layers

    @property
    def width(self) -> int:
        """Bytes of one cell: one token and head in one plane."""
        return 2 * self.head_bytes if self.fused and not self.latent else self.head_bytes

    def shape(self, block_tokens: int) -> GroupShape:
        """What the control plane knows of it, in an engine with blocks of so many tokens."""
        return GroupShape(self.block_tokens or block_tokens, self.window)


@frozen
class _Pages:
    """Memory of one group. ``shadow`` is what the engine itself wrote, or accepted from a load."""

    shape: FakeGroup
    memory: NDArray[np.uint8]
    shadow: NDArray[np.uint8]
    key: NDArray[np.uint64] = field(repr=False)
    block_tokens: int

    def cells(self, memory: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """(planes, blocks, heads, tokens, width) without a copy."""
        planes, blocks, stride = memory.shape
        shape = (planes, blocks, self.shape.heads, self.block_tokens, self.shape.width)
        token = self.shape.width
        strides = (blocks * stride, stride, self.block_tokens * token, token, 1)
        return np.lib.stride_tricks.as_strided(memory, shape, strides)

    def content(self, histories: Histories) -> NDArray[np.uint8]:
        """(planes, heads, tokens, width): what these tokens look like."""
        mixed = histories[None, None, :, None] ^ self.key[:, :, None, :]
        return ((mixed * _SPREAD) >> _SHIFT).astype(np.uint8)


class FakeMemory:
    """The paged KV memory of one rank, poisoned wherever nothing valid stands.

    Block numbers are common to all groups, and each belongs to one of them at a time. Everything the
    engine does goes through methods, so whatever else changed the memory shows in :meth:`strays`.
    """

    def __init__(self, groups: Sequence[FakeGroup], *, blocks: int, block_tokens: int, rank: int = 0) -> None:
        self.blocks = blocks
        self.shapes = tuple(group.shape(block_tokens) for group in groups)
        self._groups = tuple(
            _pages(group, blocks, shape.block_tokens, np.random.default_rng((rank, number)))
            for number, (group, shape) in enumerate(zip(groups, self.shapes, strict=True))
        )

    def engine_groups(self) -> tuple[EngineGroup, ...]:
        """What a worker registers."""
        return tuple(
            EngineGroup(
                block_tokens=pages.block_tokens,
                planes=tuple(_planes(number, pages, self.blocks)),
            )
            for number, pages in enumerate(self._groups)
        )

    def write(self, group: int, block: int, first: int, histories: Histories) -> None:
        """The forward pass computes tokens ``first`` and on of a block."""
        pages = self._groups[group]
        content = pages.content(histories)
        for memory in (pages.memory, pages.shadow):
            pages.cells(memory)[:, block, :, first : first + len(histories), :] = content

    def right(self, group: int, block: int, histories: Histories) -> bool:
        """Whether the first tokens of a block hold what these histories demand, in every plane."""
        pages = self._groups[group]
        found = pages.cells(pages.memory)[:, block, :, : len(histories), :]
        return bool(np.array_equal(found, pages.content(histories)))

    def first_wrong(self, group: int, table: Sequence[int], histories: Histories) -> int | None:
        """Index of the first block of a block table that does not hold its part of the histories,
        among those that the token after the histories attends to."""
        shape = self.shapes[group]
        size = shape.block_tokens
        for index in range(shape.first_needed(len(histories)), -(-len(histories) // size)):
            part = histories[index * size : (index + 1) * size]
            if not self.right(group, table[index], part):
                return index
        return None

    def poison(self, block: int) -> None:
        """Somebody else owns the block now, in whatever group."""
        for pages in self._groups:
            for memory in (pages.memory, pages.shadow):
                pages.cells(memory)[:, block] = _POISON

    def accept(self, group: int, block: int) -> None:
        """What a load wrote into this block is part of the engine's memory from now on."""
        pages = self._groups[group]
        pages.cells(pages.shadow)[:, block] = pages.cells(pages.memory)[:, block]

    def strays(self, loading: Sequence[Collection[int]]) -> list[str]:
        """Blocks, and gaps between them, that changed though the engine did not change them.

        ``loading`` names per group the blocks that a load may be writing.
        """
        found = []
        for number, pages in enumerate(self._groups):
            differ = (pages.memory != pages.shadow).any(axis=(0, 2))
            page = pages.shape.heads * pages.block_tokens * pages.shape.width
            gaps = (pages.memory[:, :, page:] != _GAP).any(axis=(0, 2))
            found += [
                f"group {number} block {block}"
                for block in np.flatnonzero(differ | gaps).tolist()
                if gaps[block] or block not in loading[number]
            ]
        return found


def _pages(shape: FakeGroup, blocks: int, block_tokens: int, random: np.random.Generator) -> _Pages:
    page = shape.heads * block_tokens * shape.width
    memory = np.full((shape.planes, blocks, page + shape.gap), _POISON, np.uint8)
    memory[:, :, page:] = _GAP
    key = random.integers(0, 1 << 63, (shape.planes, shape.heads, shape.width), np.uint64)
    return _Pages(shape, memory, memory.copy(), key, block_tokens)


def _planes(number: int, pages: _Pages, blocks: int) -> Iterator[PagePlane]:
    stride = pages.memory.shape[2]
    for plane in range(pages.shape.planes):
        layer = plane * pages.shape.layers // pages.shape.planes
        yield PagePlane(
            layer=f"group{number}.layer{layer}",
            address=pages.memory.ctypes.data + plane * blocks * stride,
            stride=stride,
            page_bytes=pages.shape.heads * pages.block_tokens * pages.shape.width,
            blocks=blocks,
            keep_alive=pages.memory,
        )
