"""Plans: what the control plane asks a data plane to copy, row by row.

A row is one block of one KV cache group and its place in a slot. Plans that must be ordered with the
forward pass travel in the connector's step metadata; their outcomes come back over the side channel.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Self

import msgspec
import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]


class Direction(enum.Enum):
    """From where to where the bytes of a transfer go."""

    SAVE = "save"
    """From the engine's blocks into slots (gather)."""
    LOAD = "load"
    """From slots into the engine's blocks (scatter)."""


class GroupRows(msgspec.Struct, frozen=True):
    """The rows of one KV cache group in a transfer: parallel little-endian int32 columns.

    Row ``i`` says: the group's block ``blocks[i]`` belongs at block position ``positions[i]`` of slot
    ``slots[i]``. Rows of one slot are neighbours.
    """

    slots: bytes
    positions: bytes
    blocks: bytes

    @classmethod
    def of(cls, slots: Sequence[int], positions: Sequence[int], blocks: Sequence[int]) -> Self:
        """Pack plain sequences of one length."""
        if not len(slots) == len(positions) == len(blocks):
            raise ValueError("the columns of a transfer have different lengths")
        return cls(
            slots=np.asarray(slots, "<i4").tobytes(),
            positions=np.asarray(positions, "<i4").tobytes(),
            blocks=np.asarray(blocks, "<i4").tobytes(),
        )

    @property
    def slot_column(self) -> Int32Array:
        return np.frombuffer(self.slots, "<i4")

    @property
    def position_column(self) -> Int32Array:
        return np.frombuffer(self.positions, "<i4")

    @property
    def block_column(self) -> Int32Array:
        return np.frombuffer(self.blocks, "<i4")

    def __len__(self) -> int:
        return len(self.slots) // 4


class Transfer(msgspec.Struct, frozen=True):
    """One unit of work of one request: rows per KV cache group.

    Groups may have different numbers of rows: their blocks may hold different numbers of tokens, and
    of a group with a window only what the window needs is copied.
    """

    id: int
    request_id: str
    direction: Direction
    groups: tuple[GroupRows, ...]

    @classmethod
    def of(
        cls,
        id: int,
        request_id: str,
        direction: Direction,
        slots: Sequence[int],
        positions: Sequence[int],
        blocks: Sequence[Sequence[int]],
    ) -> Self:
        """Pack plain sequences: the same places in every group, a column of blocks for each."""
        return cls(
            id=id,
            request_id=request_id,
            direction=direction,
            groups=tuple(GroupRows.of(slots, positions, column) for column in blocks),
        )

    def slot_numbers(self) -> list[int]:
        """Every slot that some row names, once, in order."""
        return sorted(set().union(*(rows.slot_column.tolist() for rows in self.groups)))

    def __len__(self) -> int:
        return sum(len(rows) for rows in self.groups)


class PeerLoad(msgspec.Struct, frozen=True):
    """A load out of a peer's memory, which passes through landing buffers.

    The rows of ``transfer`` name its chunks by their place in ``slots``: the slots of the same rank of the
    peer, in its region of that name, with so many ``tokens`` each. They may be read until ``deadline``, a
    time of the scheduler's clock, and for so many ``seconds`` from when the load is begun.
    """

    transfer: Transfer
    peer: str
    epoch: bytes
    region: str
    slots: tuple[int, ...]
    tokens: tuple[int, ...]
    deadline: float
    seconds: float


class StepPlan(msgspec.Struct, frozen=True):
    """Everything one engine step asks of every rank.

    ``sync_loads`` must be in the engine's memory before the forward pass, ``loads`` and ``peer_loads`` may
    finish whenever they do; a request may have one of each. ``saves`` read blocks that this step's forward
    pass completes. ``flush`` names requests whose pending saves must end before this step overwrites blocks
    that were theirs. ``ended`` names finished requests whose blocks the engine keeps until all their saves
    are done; each is reported exactly once. ``idle`` says that the step runs no tokens, so that waiting a
    moment for a load delays nobody; ``rising``, that some request waits for a lower tier; ``seeking``, that
    some waits for an answer of others, of which workers do not hear.
    """

    sync_loads: tuple[Transfer, ...] = ()
    loads: tuple[Transfer, ...] = ()
    peer_loads: tuple[PeerLoad, ...] = ()
    saves: tuple[Transfer, ...] = ()
    flush: tuple[str, ...] = ()
    ended: tuple[str, ...] = ()
    idle: bool = False
    rising: bool = False
    seeking: bool = False


class TransferResult(msgspec.Struct, frozen=True):
    """What became of a transfer on one rank.

    ``failed_slots`` names every slot whose rows were not copied in full. Empty means success.
    """

    id: int
    failed_slots: tuple[int, ...] = ()
    reason: str = ""
