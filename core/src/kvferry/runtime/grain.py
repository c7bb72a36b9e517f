"""How tokens are cut: blocks of each KV cache group, the grain of hits, chunks."""

from __future__ import annotations

import math
from collections.abc import Sequence

from attrs import field, frozen

NULL_BLOCK = 0
"""Stands in a block table for blocks that a window has left behind. Never read, never written."""


@frozen
class GroupShape:
    """What the control plane must know of one KV cache group.

    A token of a group with a ``window`` attends to ``window`` tokens, itself included; the engine keeps
    no blocks for anything older. ``None`` means that every block is kept until the request ends.
    """

    block_tokens: int
    window: int | None = None

    def first_needed(self, computed: int) -> int:
        """The first block, by its index in a request, that tokens from ``computed`` on attend to."""
        if self.window is None:
            return 0
        return max(0, computed - self.window + 1) // self.block_tokens


@frozen
class Grain:
    """Tokens of a chunk, and the groups whose blocks it holds.

    ``block`` tokens are whole blocks in every group; hits and tails end at a multiple of it.
    """

    chunk: int
    groups: tuple[GroupShape, ...]
    block: int = field(init=False)
    windows: bool = field(init=False)
    """Whether any group has a window."""

    @classmethod
    def of(cls, chunk: int, groups: Sequence[GroupShape]) -> Grain:
        return cls(chunk, tuple(groups))

    @block.default
    def _block(self) -> int:
        return math.lcm(*(group.block_tokens for group in self.groups))

    @windows.default
    def _windows(self) -> bool:
        return any(group.window is not None for group in self.groups)
