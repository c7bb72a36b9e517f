"""What must hold in a world, at every step of a slot, after every event, and now and then."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvferry.control.entries import State
from kvferry.runtime.requests import LoadState
from tests.simulation.events import SimulationFailure, require
from tests.simulation.ranks import busy
from tests.simulation.truth import stored
from tests.simulation.wishes import GOING

if TYPE_CHECKING:
    from tests.simulation.world import World

LONGEST_LEASE_SECONDS = 300.0
LARGEST_LAG = 0.05


class Checks:
    """Looks at everything in a world; raises :class:`SimulationFailure` for what must never be."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._dirty = False

    def wrong_in_slot(self, slot: int, blocks: Sequence[int]) -> str:
        for rank, memory in enumerate(self.world.memories):
            held = memory[slot]
            for position, block in enumerate(blocks):
                if held[position] != stored(block, rank, self.world.truth.weights):
                    return f"rank {rank} has other bytes in block {position} of slot {slot}"
        return ""

    def slot_stepped(self, row: int, before: State, after: State) -> None:
        self._dirty = True
        residency = self.world.manager._residency
        entries, slot = residency.entries, residency.tier.slot.view[row]
        if after is State.VISIBLE:
            blocks = self.world.truth.right(entries.digests.digest(row))
            wrong = self.wrong_in_slot(slot, blocks)
            require(not wrong, "visible only when all ranks wrote", wrong)
        if after in GOING:
            evicted = before is State.VISIBLE and self.world.manager.evicting
            digest = entries.digests.digest(row)
            self.world.manager.pinned.leaves(digest, self.world.loop.now, evicted=evicted)
        if before is State.VISIBLE:
            behind = (entries.parent.array == row) & (entries.state.array == State.VISIBLE)
            require(not behind.any(), "tails go before heads", f"row {row} goes before what is behind it")
        if after is State.FREE:
            read = self.world.manager.slots_read[slot] > 0
            require(not read, "a leased slot stays", f"slot {slot} was freed under a read lease")
            name = "a slot that may be written stays"
            require(not busy(self.world.ranks, slot), name, f"a worker may still write slot {slot}")

    def after_event(self) -> None:
        """After every event: what can be looked at quickly."""
        if not self._dirty:
            return
        self._dirty = False
        stats = self.world.manager.stats()
        parts = stats.free + stats.resident + stats.retiring + stats.reserved + stats.quarantined
        require(parts == stats.capacity, "slots are counted rightly", str(stats))
        manager = self.world.manager
        counts = (len(manager.reads), len(manager.writes))
        require(
            (stats.leases, stats.reservations) == counts, "every lease ends", f"{stats}, due are {counts}"
        )
        leased = sum(count > 0 for count in manager.slots_read.values())
        require(stats.leased == leased, "leased slots are counted rightly", f"{stats}, due are {leased}")
        entries = manager._residency.entries
        visible = np.flatnonzero(entries.state.array == State.VISIBLE)
        parents = entries.parent.array[visible]
        parents = parents[parents >= 0]
        whole = bool((entries.state.array[parents] == State.VISIBLE).all())
        require(whole, "a visible chunk has all before it", "a chain has a hole")

    def audit(self) -> None:
        """Now and then: everything against everything."""
        try:
            self.world.manager.check()
        except AssertionError as error:
            raise SimulationFailure("the manager's own audit", str(error)) from error
        self.world.manager.check_quotas()
        now = self.world.loop.now
        for number, read in self.world.manager.reads.items():
            late = not read.in_flight and read.deadline < self.world.latest_timers - LARGEST_LAG
            late |= now - read.opened > LONGEST_LEASE_SECONDS
            require(not late, "every lease ends", f"lease {number} of {read.owner} since {read.opened}")
            if read.owner.startswith("request-") and not read.in_flight and self.world.runtime is not None:
                state = self.world.runtime._requests.get(read.owner)
                matched = state is not None and state.load is LoadState.MATCHED and state.lease == number
                require(matched, "a match is given back at once", f"lease {number} of {read.owner}")
        for number, write in self.world.manager.writes.items():
            late = now - write.opened > LONGEST_LEASE_SECONDS
            require(not late, "every lease ends", f"reservation {number} of {write.owner}")
        residency = self.world.manager._residency
        for row in np.flatnonzero(residency.entries.state.array == State.VISIBLE).tolist():
            blocks = self.world.truth.right(residency.entries.digests.digest(row))
            wrong = self.wrong_in_slot(residency.tier.slot.view[row], blocks)
            require(not wrong, "visible chunks are right on all ranks", wrong)
