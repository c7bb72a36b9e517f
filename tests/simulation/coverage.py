"""Which steps slots and leases took: each must have been taken, and no other may be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from kvferry.control.entries import State
from tests.simulation.events import require

SLOT_STEPS = (
    (State.FREE, State.RESERVED),
    (State.RESERVED, State.WRITTEN),
    (State.RESERVED, State.FREE),
    (State.RESERVED, State.QUARANTINED),
    (State.WRITTEN, State.VISIBLE),
    (State.WRITTEN, State.FREE),
    (State.VISIBLE, State.RETIRING),
    (State.VISIBLE, State.FREE),
    (State.RETIRING, State.FREE),
    (State.QUARANTINED, State.FREE),
)
LEASE_STEPS = (
    "read: opened",
    "read: renewed",
    "read: load begun",
    "read: load finished",
    "read: released",
    "read: release deferred",
    "read: expired",
    "read: owner ended",
    "read: owner ended during the load",
    "read: worker lost",
    "read: lent",
    "read: set aside",
    "write: opened",
    "write: renewed",
    "write: renewed too late",
    "write: completed",
    "write: completed in part",
    "write: failed",
    "write: aborted",
    "write: abandoned",
    "write: expired",
    "write: result came late",
    "write: owner ended",
    "write: kept beyond its owner",
    "write: worker lost",
    "asked about: ended",
    "asked about: unknown",
)
WISHES = (
    "pin: pinned",
    "pin: absent",
    "pin: no-room",
    "pin: came to its end",
    "pin: taken back",
    "told: stored",
    "told: removed",
    "told: lost count",
    "told: caught up",
    "chunks: ended",
    "clear: in slices",
)
"""What became of wishes for chunks."""
QUOTAS = (
    "raised",
    "lowered",
    "default changed",
    "forgotten",
    "forgotten: unknown",
    "owner made room",
    "chunks refused",
    "enforced: within it",
    "enforced: in use beyond it",
)
"""What became of quotas, in the worlds whose policy keeps some."""
TIERS = (
    "paused -> opening",
    "opening -> open",
    "opening -> closing",
    "opening -> paused",
    "open -> closing",
    "open -> paused",
    "closing -> paused",
    "store: ended",
    "store: ended in part",
    "store: failed",
    "store: cancelled",
    "store: no-space",
    "store: timeout",
    "fetch: ended",
    "fetch: ended in part",
    "fetch: failed",
    "fetch: cancelled",
    "fetch: called off",
    "fetch: gone",
    "fetch: corrupt",
    "fetch: timeout",
    "delete: ended",
    "delete: ended in part",
    "delete: failed",
    "delete: cancelled",
    "delete: timeout",
    "rise: shared",
    "rise: took too long",
    "crash: writes lost",
    "crash: others' chunks left",
)
"""What became of the tiers below the first, and of what they were asked for."""
ENDS = (
    "waiting: aborted",
    "matched: aborted",
    "rising: aborted",
    "loading: aborted",
    "running: aborted",
    "preempted: aborted",
    "running: finished",
    "running: preempted",
    "loading: failed",
    "loading: loaded",
    "waiting: rises",
    "waiting: rose",
    "waiting: engine died",
    "running: engine died",
)
"""What became of requests, by where they were."""


class Coverage:
    """Counts of steps, and what to do at each step of a slot."""

    def __init__(self) -> None:
        self.slots: Counter[tuple[State, State]] = Counter()
        self.leases: Counter[str] = Counter()
        self.requests: Counter[str] = Counter()
        self.wishes: Counter[str] = Counter()
        self.quotas: Counter[str] = Counter()
        self.tiers: Counter[str] = Counter()

    def lease(self, step: str) -> None:
        self.leases[step] += 1

    def request(self, step: str) -> None:
        self.requests[step] += 1

    def wish(self, step: str) -> None:
        self.wishes[step] += 1

    def quota(self, step: str) -> None:
        self.quotas[step] += 1

    def tier(self, step: str) -> None:
        self.tiers[step] += 1

    def add(self, other: Coverage) -> None:
        self.slots += other.slots
        self.leases += other.leases
        self.requests += other.requests
        self.wishes += other.wishes
        self.quotas += other.quotas
        self.tiers += other.tiers

    def rows(self) -> Iterator[tuple[str, str, int]]:
        """Kind, step and count of every step that must be taken."""
        for before, after in SLOT_STEPS:
            yield "slot", f"{before.name.lower()} -> {after.name.lower()}", self.slots[before, after]
        for kind, steps, counts in (
            ("lease", LEASE_STEPS, self.leases),
            ("request", ENDS, self.requests),
            ("wish", WISHES, self.wishes),
            ("quota", QUOTAS, self.quotas),
            ("tier", TIERS, self.tiers),
        ):
            for step in steps:
                yield kind, step, counts[step]

    def missing(self) -> list[str]:
        return [f"{kind} {step}" for kind, step, count in self.rows() if not count]

    def unknown(self) -> list[str]:
        """Steps that were counted under a name that no table has; for the tests of the tables."""
        known = {*LEASE_STEPS, *ENDS, *WISHES, *QUOTAS, *TIERS}
        counted = self.leases + self.requests + self.wishes + self.quotas + self.tiers
        return sorted(step for step in counted if step not in known)


class StateColumn:
    """Stands in front of the column of states and sees every step of a slot, however many one call makes."""

    def __init__(
        self, view: memoryview[int], coverage: Coverage, on_step: Callable[[int, State, State], None]
    ) -> None:
        self._view = view
        self._coverage = coverage
        self._on_step = on_step

    def __getitem__(self, row: int) -> int:
        return self._view[row]

    def __setitem__(self, row: int, new: int) -> None:
        old = self._view[row]
        if old == new:
            return
        step = (State(old), State(new))
        require(step in SLOT_STEPS, "slots take known steps", f"row {row}: {step[0].name} to {step[1].name}")
        self._coverage.slots[step] += 1
        self._view[row] = new
        self._on_step(row, *step)


def lines(rows: Iterable[tuple[str, str, int]]) -> str:
    """A table for people."""
    return "\n".join(f"  {kind:<8} {step:<44} {count:>9,}" for kind, step, count in rows)
