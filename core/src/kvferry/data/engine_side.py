"""The engine's memory as pages, and the address arithmetic between pages and slots.

EngineSide never leaves the worker process. It knows nothing about keys: it turns rows of a
:class:`~kvferry.data.plans.Transfer` into address columns that a span copier executes.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np
from attrs import field, frozen
from numpy.typing import NDArray

from kvferry.api import ErrorKind, KVFerryError, MemoryKind, Region
from kvferry.api.units import round_up
from kvferry.data.plans import Direction, Transfer

AddressColumn = NDArray[np.uint64]


@frozen(kw_only=True)
class PagePlane:
    """One strided plane of pages: block ``b`` of one layer lies at ``address + b * stride``.

    A layer whose K and V share a page is one plane; separate K and V tensors are two.
    ``keep_alive`` owns the memory.
    """

    layer: str
    address: int
    stride: int
    page_bytes: int
    blocks: int
    form: str = ""
    """How the bytes of a page are arranged, in the engine's words: pages of another form hold the same
    tokens in other bytes."""
    keep_alive: object = field(default=None, eq=False, repr=False)

    def __attrs_post_init__(self) -> None:
        if not 0 < self.page_bytes <= self.stride:
            raise ValueError(
                f"layer {self.layer}: pages of {self.page_bytes} bytes overlap at stride {self.stride}"
            )


@frozen(kw_only=True)
class EngineGroup:
    """The planes of one KV cache group on this rank, in the model's layer order."""

    block_tokens: int
    planes: tuple[PagePlane, ...]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all planes of the group."""
        return sum(plane.page_bytes for plane in self.planes)


@frozen(kw_only=True)
class SlotLayout:
    """How one slot is cut: group after group, inside a group block after block, inside a block plane
    after plane.

    Block-major, so that a hit that ends inside a chunk reads one contiguous piece per group. Slot
    ``s`` begins at ``s * total_bytes``, so that an arena whose first pages are touched already has
    its first slots ready.
    """

    blocks_per_slot: tuple[int, ...]
    """Per group: a block may hold another number of tokens in each."""
    block_bytes: tuple[int, ...]
    """Per group."""
    alignment: int = 1
    """Slots begin at multiples of it, which direct file I/O needs."""

    @property
    def slot_bytes(self) -> tuple[int, ...]:
        """Per group."""
        return tuple(
            blocks * size for blocks, size in zip(self.blocks_per_slot, self.block_bytes, strict=True)
        )

    @property
    def total_bytes(self) -> int:
        """From one slot to the next: all groups, and what the alignment adds."""
        return round_up(sum(self.slot_bytes), self.alignment)

    def value_bytes(self, tokens: int, chunk_tokens: int) -> int:
        """Bytes from the start of a slot that hold a chunk of so many tokens."""
        if len(self.block_bytes) > 1 or tokens == chunk_tokens:
            return self.total_bytes  # a tail of several groups lies in pieces
        return round_up(tokens * self.slot_bytes[0] // chunk_tokens, self.alignment)

    def slots_in(self, length: int) -> int:
        """How many whole slots fit into ``length`` bytes."""
        return length // self.total_bytes


def hit_grain(groups: Sequence[EngineGroup]) -> int:
    """Tokens that are whole blocks in every group; hits end at a multiple of it."""
    return math.lcm(*(group.block_tokens for group in groups))


class EngineSide:
    """Turns transfers into address columns between the engine's pages and an arena's slots.

    Immutable after construction, so any thread may call it.
    """

    def __init__(self, groups: Sequence[EngineGroup], chunk_tokens: int, alignment: int = 1) -> None:
        if not groups or any(not group.planes for group in groups):
            raise KVFerryError("the engine registered no KV cache", kind=ErrorKind.INTERNAL, where="engine")
        for tokens in sorted({group.block_tokens for group in groups}):
            if chunk_tokens % tokens:
                raise KVFerryError(
                    f"chunk_tokens {chunk_tokens} is not a multiple of the engine's block size {tokens}",
                    kind=ErrorKind.COMPATIBILITY,
                    remedy=f"set chunk_tokens to a multiple of {hit_grain(groups)}",
                )
        self.groups = tuple(groups)
        self.layout = SlotLayout(
            blocks_per_slot=tuple(chunk_tokens // group.block_tokens for group in groups),
            block_bytes=tuple(group.block_bytes for group in groups),
            alignment=alignment,
        )
        self._planes = tuple(_PlaneColumns.of(group) for group in groups)

    def shard(self, rank: int, world_size: int) -> bytes:
        """A digest of what this rank's bytes depend on beside a chunk's key."""
        described = [(rank, world_size, self.layout.alignment)] + [
            (group.block_tokens, [(plane.layer, plane.page_bytes, plane.form) for plane in group.planes])
            for group in self.groups
        ]
        return hashlib.sha256(repr(described).encode()).digest()

    def regions(self) -> list[Region]:
        """The engine's memory, one region per plane, for bounds checks of plans."""
        return [
            Region(
                name=f"engine/{number}/{plane.layer}/{index}",
                address=plane.address,
                length=(plane.blocks - 1) * plane.stride + plane.page_bytes,
                kind=MemoryKind.HOST,
                keep_alive=plane.keep_alive,
            )
            for number, group in enumerate(self.groups)
            for index, plane in enumerate(group.planes)
        ]

    def check(self, transfer: Transfer, slots: int) -> None:
        """Refuse rows that name a block, slot or position outside of what exists.

        Raises :class:`KVFerryError` of kind PROTOCOL; nothing was copied then.
        """
        if len(transfer.groups) != len(self.groups):
            raise _refused(transfer, "its columns do not fit the engine's groups")
        for number, rows in enumerate(transfer.groups):
            slot, position, block = rows.slot_column, rows.position_column, rows.block_column
            if not len(slot) == len(position) == len(block):
                raise _refused(transfer, "its columns have different lengths")
            if not len(slot):
                continue
            if slot.min() < 0 or slot.max() >= slots:
                raise _refused(transfer, f"slot {int(slot.max())} of {slots} slots")
            if position.min() < 0 or position.max() >= self.layout.blocks_per_slot[number]:
                raise _refused(transfer, f"position {int(position.max())} in a slot")
            available = min(plane.blocks for plane in self.groups[number].planes)
            if block.min() < 0 or block.max() >= available:
                raise _refused(transfer, f"block {int(block.max())} of {available} blocks")

    def spans(
        self, transfer: Transfer, arena: Region, group: int, rows: slice
    ) -> tuple[AddressColumn, AddressColumn, AddressColumn]:
        """Address columns ``(destination, source, length)`` for some rows of a group of a transfer.

        One span per row and plane. The rows must have passed :meth:`check`.
        """
        columns, wanted = self._planes[group], transfer.groups[group]
        slot = wanted.slot_column[rows].astype(np.uint64)
        position = wanted.position_column[rows].astype(np.uint64)
        block = wanted.block_column[rows].astype(np.uint64)
        layout = self.layout
        base = np.uint64(arena.address + sum(layout.slot_bytes[:group]))
        in_slot = position * np.uint64(layout.block_bytes[group])
        in_arena = base + slot * np.uint64(layout.total_bytes) + in_slot
        engine = (columns.address[None, :] + block[:, None] * columns.stride[None, :]).ravel()
        stored = (in_arena[:, None] + columns.offset[None, :]).ravel()
        length = np.tile(columns.length, len(block))
        if transfer.direction is Direction.SAVE:
            return stored, engine, length
        return engine, stored, length


@frozen
class _PlaneColumns:
    address: AddressColumn
    stride: AddressColumn
    offset: AddressColumn
    length: AddressColumn

    @classmethod
    def of(cls, group: EngineGroup) -> _PlaneColumns:
        length = np.array([plane.page_bytes for plane in group.planes], np.uint64)
        offset = np.concatenate(([0], np.cumsum(length)[:-1])).astype(np.uint64)
        return cls(
            address=np.array([plane.address for plane in group.planes], np.uint64),
            stride=np.array([plane.stride for plane in group.planes], np.uint64),
            offset=offset,
            length=length,
        )


def _refused(transfer: Transfer, why: str) -> KVFerryError:
    return KVFerryError(
        f"a plan of request {transfer.request_id} names memory that does not exist",
        kind=ErrorKind.PROTOCOL,
        where="worker",
        why=why,
    )
