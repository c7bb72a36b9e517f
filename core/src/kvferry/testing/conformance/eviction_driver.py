"""One eviction policy, driven the way the manager drives it, with a watch on what it may not do."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from attrs import define, field

from kvferry.api import NO_PARENT, Claim, EntryView, Evicted, EvictionPolicy, NotEnough


@define(eq=False)
class Resident:
    """A chunk of the driver's. ``name`` says which one it is, whatever its id."""

    name: int
    view: EntryView
    leases: int = 0
    pending: int = 0
    """Chunks behind it that are reserved and not visible, of which a policy is not told."""


Numbering = Callable[[Sequence[int]], int]
"""Which of the free ids, in rising order, the next chunk gets."""


def lowest(free: Sequence[int]) -> int:
    return free[0]


def highest(free: Sequence[int]) -> int:
    return free[-1]


@define(eq=False)
class PolicyDriver:
    """An open policy and the tree of chunks that it is told of.

    Every claim, and every answer of the policy, is held against the contract; what is wrong raises
    ``AssertionError``.
    """

    policy: EvictionPolicy
    entries: int
    numbering: Numbering = lowest
    views: bool = True
    """Whether many ids are given as memory views, as the manager does, or as lists."""
    residents: dict[int, Resident] = field(factory=dict)
    history: list[tuple[int, ...]] = field(factory=list)
    """Names of the victims of each eviction that succeeded."""
    _names: int = 0

    def __attrs_post_init__(self) -> None:
        self.policy.open(self.entries)

    # What the manager tells

    def insert(self, parent: Resident | None = None, owner: str = "", size: int = 1) -> Resident | None:
        """A new chunk, or None when there is no id for it."""
        free = [entry for entry in range(self.entries) if entry not in self.residents]
        if not free:
            return None
        if parent is not None:
            owner = parent.view.owner
        self._names += 1
        key = hashlib.sha256(str(self._names).encode()).digest()
        view = EntryView(
            self.numbering(free),
            NO_PARENT if parent is None else parent.view.id,
            0 if parent is None else parent.view.depth + 1,
            size,
            owner,
            key,
        )
        made = self.residents[view.id] = Resident(self._names, view)
        self.policy.insert(view)
        return made

    def chain(self, length: int, owner: str = "") -> list[Resident]:
        """New chunks, each behind the one before it."""
        made: list[Resident] = []
        for _ in range(length):
            resident = self.insert(made[-1] if made else None, owner)
            assert resident is not None, "the driver has no id left"
            made.append(resident)
        return made

    def touch(self, resident: Resident) -> None:
        """A use of everything up to ``resident``."""
        self.policy.touch(self.ids(self.prefix(resident)))

    def lease(self, resident: Resident, *, used: bool = True) -> None:
        for before in self.prefix(resident):
            before.leases += 1
        if used:
            self.touch(resident)

    def end_lease(self, resident: Resident) -> None:
        prefix = self.prefix(resident)
        for before in prefix:
            before.leases -= 1
        self.release([before for before in prefix if self.is_bare(before)])

    def release(self, residents: Sequence[Resident]) -> None:
        if residents:
            self.policy.release(self.ids(residents))

    def drop(self, resident: Resident) -> None:
        """Remove a chunk with everything behind it."""
        branch = [resident]
        for at in branch:
            branch += self.behind(at)
        for gone in branch:
            del self.residents[gone.view.id]
        self.policy.remove(self.ids(branch[::-1]))
        self._bared([resident.view.parent])

    # Evictions

    def evict(self, need: int, owner: str | None = None) -> Evicted | NotEnough:
        """One eviction, among the chunks of ``owner`` alone if given, with all that belongs to it."""
        available = self.available(owner)
        gone: list[Resident] = []
        asked = 0

        def claim(entry: int) -> Claim:
            nonlocal asked
            asked += 1
            assert asked <= 20 * self.entries + 100, "the policy asks for the same chunks over and over"
            assert type(entry) is int, f"a claim for {entry!r}, which is not a plain int"
            resident = self.residents.get(entry)
            assert resident is not None, f"a claim for id {entry}, which is nobody's"
            assert resident not in gone, f"a claim for id {entry}, which was taken already"
            assert owner in (None, resident.view.owner), f"a claim for a chunk of {resident.view.owner!r}"
            if resident.leases:
                answer = Claim.LEASED
            elif resident.pending or any(other not in gone for other in self.behind(resident)):
                answer = Claim.HAS_SUCCESSORS
            else:
                gone.append(resident)
                return Claim.TAKEN
            return answer

        answer = self._ask(need, owner, claim)
        size = sum(resident.view.size for resident in gone)
        if isinstance(answer, NotEnough):
            assert answer.available == size, f"{answer.available} are said to be available, {size} were"
            assert size < need, f"{size} were taken, {need} needed, and yet it is said not to be enough"
            assert size == available, f"{size} of the {available} that can go were found"
            return answer
        assert isinstance(answer, Evicted), f"an eviction gave {answer!r}"
        ids = tuple(resident.view.id for resident in gone)
        assert answer.ids == ids, f"{answer.ids} is not what was taken, which is {ids}"
        assert size >= need, f"{size} were taken, {need} needed"
        assert not gone or size - gone[-1].view.size < need, f"{size} were taken for {need}: too much"
        self.history.append(tuple(resident.name for resident in gone))
        for entry in ids:
            del self.residents[entry]
        self.policy.remove(answer.ids)
        self._bared([resident.view.parent for resident in gone])
        return answer

    def _ask(self, need: int, owner: str | None, claim: Callable[[int], Claim]) -> Evicted | NotEnough:
        if owner is None:
            return self.policy.evict(need, claim)
        quotas: Any = self.policy
        answer: Evicted | NotEnough = quotas.evict_owned(owner, need, claim)
        return answer

    def available(self, owner: str | None = None) -> int:
        """The size of all chunks that can go, tails before heads."""
        going: set[int] = set()
        kept: set[int] = {NO_PARENT}
        """Chunks that stay, or that something which stays stands behind."""
        for resident in sorted(self.residents.values(), key=lambda one: -one.view.depth):
            mine = owner in (None, resident.view.owner)
            if resident.leases or resident.pending or resident.view.id in kept or not mine:
                kept.add(resident.view.parent)
            else:
                going.add(resident.view.id)
        return sum(self.residents[entry].view.size for entry in going)

    def end_uses(self) -> None:
        """Nothing is leased any more, and no chunk on its way stands behind any."""
        for resident in self.residents.values():
            resident.leases = resident.pending = 0
        self.release([resident for resident in self.residents.values() if self.is_bare(resident)])

    def evict_all(self) -> None:
        """End every use and let everything go, one chunk after the other."""
        self.end_uses()
        while self.residents:
            before = len(self.residents)
            self.evict(1)
            assert len(self.residents) < before, "nothing is in use any more, and yet nothing goes"

    # The tree

    def ids(self, residents: Sequence[Resident]) -> Sequence[int]:
        ids = [resident.view.id for resident in residents]
        return np.array(ids, np.int64).data if self.views else ids

    def prefix(self, resident: Resident) -> list[Resident]:
        found = [resident]
        while found[-1].view.parent != NO_PARENT:
            found.append(self.residents[found[-1].view.parent])
        return found[::-1]

    def behind(self, resident: Resident) -> list[Resident]:
        return [other for other in self.residents.values() if other.view.parent == resident.view.id]

    def is_bare(self, resident: Resident) -> bool:
        """Whether the manager would let it go now."""
        return not (resident.leases or resident.pending or self.behind(resident))

    def named(self, name: int) -> Resident | None:
        return next((one for one in self.residents.values() if one.name == name), None)

    def _bared(self, parents: Sequence[int]) -> None:
        found = [self.residents[parent] for parent in dict.fromkeys(parents) if parent in self.residents]
        self.release([resident for resident in found if self.is_bare(resident)])


_STEPS = ("insert",) * 5 + ("touch", "touch", "evict", "drop")
_USES = ("lease", "unlease", "wait")


def live(
    drivers: Sequence[PolicyDriver],
    seed: int,
    steps: int,
    between: Callable[[int], None] = lambda step: None,
    *,
    owners: Sequence[str] = ("",),
    largest: int = 1,
    in_use: bool = True,
) -> None:
    """Let all ``drivers`` live through the same ``steps``, chosen by ``seed`` from what the first one
    holds. ``between`` is called before each step with its number. Unless ``in_use``, no chunk is ever
    leased or stood upon by a reserved one, so that no claim on a leaf is refused."""
    random_ = random.Random(seed)
    first = drivers[0]
    for step in range(steps):
        between(step)
        names = sorted(resident.name for resident in first.residents.values())
        what = random_.choice(_STEPS + _USES * in_use)
        name = random_.choice(names) if names else 0
        root, owner, size = random_.random() < 0.3, random_.choice(owners), random_.randint(1, largest)
        need = random_.randint(1, 4)
        for driver in drivers:
            _step(driver, what, name, root=root, owner=owner, size=size, need=need)


def _step(
    driver: PolicyDriver, what: str, name: int, *, root: bool, owner: str, size: int, need: int
) -> None:
    chosen = driver.named(name)
    if what == "insert":
        if len(driver.residents) == driver.entries:
            driver.evict(need)
            chosen = driver.named(name)
        driver.insert(None if root else chosen, owner, size)
    elif what == "evict":
        driver.evict(need)
    elif chosen is None:
        return
    elif what == "touch":
        driver.touch(chosen)
    elif what == "lease":
        driver.lease(chosen, used=root)
    elif what == "unlease" and all(before.leases for before in driver.prefix(chosen)):
        driver.end_lease(chosen)
    elif what == "wait":
        chosen.pending = 1 - chosen.pending
        if driver.is_bare(chosen):
            driver.release([chosen])
    elif what == "drop" and root:
        driver.drop(chosen)
