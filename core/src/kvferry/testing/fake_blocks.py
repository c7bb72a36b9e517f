"""The block pool of a fake engine: reference counts and a prefix cache."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable

from kvferry.runtime.grain import NULL_BLOCK


class FakeBlocks:
    """Which blocks are in use, by how many, and which hold content that can be found again.

    A block that nobody uses keeps its content findable until it is taken for something else; the
    one that is free for longest goes first. ``stale`` collects blocks whose content is anybody's
    from now on. The block ``NULL_BLOCK`` is nobody's. ``reuse_at_once`` hands out what was freed last, as
    early as can be: the hardest order for whoever reads a block that was given back.
    """

    def __init__(self, count: int, *, prefix_cache: bool, reuse_at_once: bool = False) -> None:
        self._users = [0] * count
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(count))
        del self._free[NULL_BLOCK]
        self._prefix_cache = prefix_cache
        self._reuse_at_once = reuse_at_once
        self._content: dict[int, Hashable] = {}
        self._found: dict[Hashable, int] = {}
        self._left_behind: set[int] = set()
        self.stale: set[int] = set()

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return len(self._users) - 1 - len(self._free)

    def take(self, count: int) -> list[int]:
        """New blocks for one user; the caller knows that there are enough."""
        taken = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            self.forget([block])
            self._left_behind.discard(block)
            self._users[block] = 1
            self.stale.add(block)
            taken.append(block)
        return taken

    def find(self, content: Hashable) -> int | None:
        """A block that holds this content."""
        return self._found.get(content)

    def is_free(self, block: int) -> bool:
        return block in self._free

    def share(self, block: int) -> None:
        """One more user."""
        self._users[block] += 1
        self._free.pop(block, None)
        self._left_behind.discard(block)

    def give_back(self, blocks: Iterable[int]) -> None:
        """One user less; the first one given is the last to be taken again."""
        for block in reversed(list(blocks)):
            if self._release(block) and block not in self._content:
                self.stale.add(block)

    def leave_behind(self, block: int) -> None:
        """One user less in the middle of a request, which the engine tells nobody. The block keeps its
        bytes until it is taken, so that whoever knows in time may finish reading them."""
        if self._release(block):
            self._left_behind.add(block)

    def _release(self, block: int) -> bool:
        self._users[block] -= 1
        assert self._users[block] >= 0, f"block {block} was given back twice"
        if self._users[block]:
            return False
        self._free[block] = None
        if self._reuse_at_once:
            self._free.move_to_end(block, last=False)
        return True

    def remember(self, block: int, content: Hashable) -> None:
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
        free = self._content.keys() & self._free.keys()
        self.stale.update(free - self._left_behind)
        self._content.clear()
        self._found.clear()

    def take_stale(self) -> set[int]:
        """Blocks that may be overwritten in the coming step."""
        stale, self.stale = self.stale, set()
        return stale
