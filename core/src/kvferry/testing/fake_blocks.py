"""The block pool of one KV cache group of a fake engine: reference counts and a prefix cache."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable


class FakeBlocks:
    """Which blocks are in use, by how many, and which hold content that can be found again.

    A block that nobody uses keeps its content findable until it is taken for something else; the
    one that is free for longest goes first. ``stale`` collects blocks whose content is anybody's
    from now on.
    """

    def __init__(self, count: int, *, prefix_cache: bool) -> None:
        self._users = [0] * count
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(count))
        self._prefix_cache = prefix_cache
        self._content: dict[int, int] = {}
        self._found: dict[int, int] = {}
        self.stale: set[int] = set()

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return len(self._users) - len(self._free)

    def take(self, count: int) -> list[int]:
        """New blocks for one user; the caller knows that there are enough."""
        taken = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            self.forget([block])
            self._users[block] = 1
            self.stale.add(block)
            taken.append(block)
        return taken

    def find(self, content: int) -> int | None:
        """A block that holds this content."""
        return self._found.get(content)

    def is_free(self, block: int) -> bool:
        return block in self._free

    def share(self, block: int) -> None:
        """One more user."""
        self._users[block] += 1
        self._free.pop(block, None)

    def give_back(self, blocks: Iterable[int]) -> None:
        """One user less; the first one given is the last to be taken again."""
        for block in reversed(list(blocks)):
            self._users[block] -= 1
            assert self._users[block] >= 0, f"block {block} was given back twice"
            if self._users[block] == 0:
                self._free[block] = None
                if block not in self._content:
                    self.stale.add(block)

    def remember(self, block: int, content: int) -> None:
        """The block holds this content from now on, or will after the step under way."""
        if self._prefix_cache and block not in self._content and content not in self._found:
            self._content[block] = content
            self._found[content] = block

    def forget(self, blocks: Iterable[int]) -> None:
        """Their content can be found no more."""
        for block in blocks:
            content = self._content.pop(block, None)
            if content is not None:
                del self._found[content]

    def forget_all(self) -> None:
        self.stale.update(block for block in self._content if block in self._free)
        self._content.clear()
        self._found.clear()

    def take_stale(self) -> set[int]:
        """Blocks that may be overwritten in the coming step."""
        stale, self.stale = self.stale, set()
        return stale
