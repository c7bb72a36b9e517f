"""Where everything lies in a store file. Depends on the size of a slot alone, never on their number."""

from __future__ import annotations

from attrs import frozen

PAGE = 4096
"""Unit of every offset and length in the file, and of memory in direct I/O."""
FORMAT_VERSION = 2
SUPERBLOCK_BYTES = 2 * PAGE
"""Two copies of one page."""
ENTRY_BYTES = 1024
ENTRIES_PER_PAGE = PAGE // ENTRY_BYTES
GROUP_SLOTS = 256
TABLE_BYTES = GROUP_SLOTS * ENTRY_BYTES
USES_BYTES = PAGE
"""One number of eight bytes for each slot of a group; the rest of the page is zero."""
LARGEST_SLOT = 1 << 40


def round_up(number: int, unit: int = PAGE) -> int:
    return -(-number // unit) * unit


@frozen
class Layout:
    """A superblock, then groups. A group is a table, a page of uses and ``GROUP_SLOTS`` slots; the last
    one may have fewer slots. So a file grows and shrinks without anything being moved.

    ``slot_bytes`` is a multiple of ``PAGE``.
    """

    slot_bytes: int

    @property
    def group_bytes(self) -> int:
        return TABLE_BYTES + USES_BYTES + GROUP_SLOTS * self.slot_bytes

    def table_at(self, group: int) -> int:
        return SUPERBLOCK_BYTES + group * self.group_bytes

    def uses_at(self, group: int) -> int:
        return self.table_at(group) + TABLE_BYTES

    def page_at(self, page: int) -> int:
        """Where the table's page of a number lies; pages count through all groups."""
        group, inside = divmod(page * ENTRIES_PER_PAGE, GROUP_SLOTS)
        return self.table_at(group) + inside * ENTRY_BYTES

    def slot_at(self, slot: int) -> int:
        group, inside = divmod(slot, GROUP_SLOTS)
        return self.uses_at(group) + USES_BYTES + inside * self.slot_bytes

    def bytes_for(self, slots: int) -> int:
        """Length of a file that holds the slots up to this number."""
        return SUPERBLOCK_BYTES if slots == 0 else self.slot_at(slots - 1) + self.slot_bytes

    def slots_within(self, length: int) -> int:
        """How many slots lie wholly in a file of ``length`` bytes."""
        groups, rest = divmod(max(0, length - SUPERBLOCK_BYTES), self.group_bytes)
        inside = max(0, rest - TABLE_BYTES - USES_BYTES) // self.slot_bytes
        return groups * GROUP_SLOTS + inside
