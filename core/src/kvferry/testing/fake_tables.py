"""Block tables of a fake engine: all groups draw on one pool, and windows give blocks back early."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from kvferry.runtime.grain import NULL_BLOCK, GroupShape
from kvferry.testing.fake_blocks import FakeBlocks
from kvferry.testing.fake_memory import TokenHistory

Tables = tuple[list[int], ...]
"""One block table per group; blocks that a window has left behind are ``NULL_BLOCK``."""


class FakeTables:
    """Allocates, shares and frees the blocks of requests, as vLLM's coordinator of KV cache groups does.

    A block belongs to one group at a time, and may serve another one next. ``grain`` tokens are whole
    blocks in every group.
    """

    def __init__(
        self, shapes: Sequence[GroupShape], blocks: int, *, prefix_cache: bool, reuse_at_once: bool
    ) -> None:
        self.shapes = tuple(shapes)
        self.grain = math.lcm(*(shape.block_tokens for shape in shapes))
        self.pool = FakeBlocks(blocks, prefix_cache=prefix_cache, reuse_at_once=reuse_at_once)

    def empty(self) -> Tables:
        return tuple([] for _ in self.shapes)

    def blocks_for(self, tokens: int) -> int:
        """Blocks of all groups, had nothing been left behind."""
        return sum(-(-tokens // shape.block_tokens) for shape in self.shapes)

    def missing(self, tables: Tables, tokens: int) -> int:
        """Blocks that tables lack to hold so many tokens."""
        return sum(
            max(0, -(-tokens // shape.block_tokens) - len(table)) for shape, table in self._each(tables)
        )

    def local_hit(self, truth: TokenHistory, tokens: int) -> tuple[int, Tables]:
        """The longest beginning that the pool holds still, with one of ``tokens`` left to compute."""
        for end in range((tokens - 1) // self.grain * self.grain, 0, -self.grain):
            found = self._find(truth, end)
            if found is not None:
                return end, found
        return 0, self.empty()

    def _find(self, truth: TokenHistory, end: int) -> Tables | None:
        tables = self.empty()
        for number, shape in enumerate(self.shapes):
            first = shape.first_needed(end)
            tables[number].extend([NULL_BLOCK] * first)
            for index in range(first, end // shape.block_tokens):
                content = truth.state((index + 1) * shape.block_tokens)
                block = self.pool.find((number, content))
                if block is None:
                    return None
                tables[number].append(block)
        return tables

    def admit(self, local: Tables, computed: int, tokens: int, reserved: int) -> Tables | None:
        """Tables of a request that goes on at token ``computed`` and holds ``tokens``: beginning with what
        is ``local``, but for what the window does not need. None unless ``reserved`` blocks stay free."""
        tables = self.empty()
        shared: list[int] = []
        for number, shape in enumerate(self.shapes):
            first = shape.first_needed(computed)
            tables[number].extend([NULL_BLOCK] * first)
            kept = [block for block in local[number][first:] if block != NULL_BLOCK]
            assert len(kept) == max(0, len(local[number]) - first), "a prefix hit lacks what it needs"
            tables[number].extend(kept)
            shared += kept
        free = self.pool.free - sum(self.pool.is_free(block) for block in shared)
        if free < self.missing(tables, tokens) + reserved:
            return None
        for block in shared:
            self.pool.share(block)
        self.grow(tables, tokens)
        return tables

    def grow(self, tables: Tables, tokens: int) -> tuple[list[int], ...] | None:
        """New blocks until the tables hold ``tokens``, per group; None when none were needed."""
        if not self.missing(tables, tokens):
            return None
        new = tuple(
            self.pool.take(max(0, -(-tokens // shape.block_tokens) - len(table)))
            for shape, table in self._each(tables)
        )
        for table, more in zip(tables, new, strict=True):
            table.extend(more)
        return new

    def leave_behind(self, tables: Tables, computed: int) -> None:
        """Give back what no token from ``computed`` on attends to."""
        for shape, table in self._each(tables):
            for index in range(min(shape.first_needed(computed), len(table)) - 1, -1, -1):
                if table[index] == NULL_BLOCK:
                    break
                self.pool.leave_behind(table[index])
                table[index] = NULL_BLOCK

    def remember(self, tables: Tables, truth: TokenHistory, tokens: int) -> None:
        """The first ``tokens`` can be found from now on, or will be after the step under way."""
        for number, (shape, table) in enumerate(self._each(tables)):
            for index in range(tokens // shape.block_tokens):
                if table[index] != NULL_BLOCK:
                    content = truth.state((index + 1) * shape.block_tokens)
                    self.pool.remember(table[index], (number, content))

    def give_back(self, tables: Tables) -> None:
        for table in tables:
            self.pool.give_back(block for block in table if block != NULL_BLOCK)

    def _each(self, tables: Tables) -> Iterator[tuple[GroupShape, list[int]]]:
        return zip(self.shapes, tables, strict=True)
