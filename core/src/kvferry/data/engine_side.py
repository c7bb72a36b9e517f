"""The engine's memory as pages, and the address arithmetic between pages and slots.

EngineSide never leaves the worker process. It knows nothing about keys: it turns rows of a
:class:`~kvferry.data.plans.Transfer` into address columns that a span copier executes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from attrs import field, frozen
from numpy.typing import NDArray

from kvferry.api import ErrorKind, KVFerryError, MemoryKind, Region
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
    keep_alive: object = field(default=None, eq=False, repr=False)

    def __attrs_post_init__(self) -> None:
        if not 0 < self.page_bytes <= self.stride:
            raise ValueError(
                f"layer {self.layer}: pages of {self.page_bytes} bytes overlap at stride {self.stride}"
            )


@frozen(kw_only=True)
class EngineGroup:
    """The planes of one KV cache group on this rank, in the model's layer order."""

    kind: str
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

    blocks_per_slot: int
    block_bytes: tuple[int, ...]
    """Per group."""

    @property
    def slot_bytes(self) -> tuple[int, ...]:
        """Per group."""
        return tuple(self.blocks_per_slot * size for size in self.block_bytes)

    @property
    def total_bytes(self) -> int:
        """Of one slot over all groups."""
        return sum(self.slot_bytes)

    def slots_in(self, length: int) -> int:
        """How many whole slots fit into ``length`` bytes."""
        return length // self.total_bytes


class EngineSide:
    """Turns transfers into address columns between the engine's pages and an arena's slots.

    Immutable after construction, so any thread may call it.
    """

    def __init__(self, groups: Sequence[EngineGroup], chunk_tokens: int) -> None:
        if not groups or any(not group.planes for group in groups):
            raise KVFerryError("the engine registered no KV cache", kind=ErrorKind.INTERNAL, where="engine")
        block_tokens = {group.block_tokens for group in groups}
        if len(block_tokens) > 1:
            raise KVFerryError(
                f"KV cache groups have different block sizes: {sorted(block_tokens)} tokens",
                kind=ErrorKind.UNSUPPORTED,
                where="engine",
                remedy="serve this model without kvferry for now",
            )
        self.block_tokens = block_tokens.pop()
        if chunk_tokens % self.block_tokens:
            raise KVFerryError(
                f"chunk_tokens {chunk_tokens} is not a multiple of the engine's block size "
                f"{self.block_tokens}",
                kind=ErrorKind.COMPATIBILITY,
                remedy=f"set chunk_tokens to a multiple of {self.block_tokens}",
            )
        self.groups = tuple(groups)
        self.layout = SlotLayout(
            blocks_per_slot=chunk_tokens // self.block_tokens,
            block_bytes=tuple(group.block_bytes for group in groups),
        )
        self._planes = tuple(_PlaneColumns.of(group) for group in groups)

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
        rows = len(transfer)
        columns_fit = len(transfer.blocks) == len(self.groups) and all(
            len(transfer.block_column(group)) == rows for group in range(len(self.groups))
        )
        if not columns_fit or len(transfer.position_column) != rows:
            raise _refused(transfer, "its columns do not fit the engine's groups")
        if rows == 0:
            return
        slot, position = transfer.slot_column, transfer.position_column
        if slot.min() < 0 or slot.max() >= slots:
            raise _refused(transfer, f"slot {int(slot.max())} of {slots} slots")
        if position.min() < 0 or position.max() >= self.layout.blocks_per_slot:
            raise _refused(transfer, f"position {int(position.max())} in a slot")
        for number, group in enumerate(self.groups):
            blocks = transfer.block_column(number)
            available = min(plane.blocks for plane in group.planes)
            if blocks.min() < 0 or blocks.max() >= available:
                raise _refused(transfer, f"block {int(blocks.max())} of {available} blocks")

    def spans(
        self, transfer: Transfer, arena: Region, rows: slice
    ) -> tuple[AddressColumn, AddressColumn, AddressColumn]:
        """Address columns ``(destination, source, length)`` for some rows of a transfer.

        One span per row, group and plane. The rows must have passed :meth:`check`.
        """
        slot = transfer.slot_column[rows].astype(np.uint64)
        position = transfer.position_column[rows].astype(np.uint64)
        engine_parts, arena_parts, length_parts = [], [], []
        for number, columns in enumerate(self._planes):
            block = transfer.block_column(number)[rows].astype(np.uint64)
            base = np.uint64(arena.address + sum(self.layout.slot_bytes[:number]))
            slot_bytes = np.uint64(self.layout.total_bytes)
            block_bytes = np.uint64(self.layout.block_bytes[number])
            in_arena = base + slot * slot_bytes + position * block_bytes
            engine_parts.append((columns.address[None, :] + block[:, None] * columns.stride[None, :]).ravel())
            arena_parts.append((in_arena[:, None] + columns.offset[None, :]).ravel())
            length_parts.append(np.tile(columns.length, len(block)))
        engine = np.concatenate(engine_parts)
        stored = np.concatenate(arena_parts)
        length = np.concatenate(length_parts)
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
