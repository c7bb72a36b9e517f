"""What every eviction policy promises."""

from __future__ import annotations

import gc
import hashlib
import random
import sys
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, cast

import pytest

from kvferry.api import EvictionPolicy, EvictionSpec, NotEnough, QuotaPolicy
from kvferry.control.lru import LRU
from kvferry.control.manager import CacheManager
from kvferry.control.outcomes import ChunkWrite, WriteOutcome
from kvferry.plugins import LoadedPlugins, load_plugins
from kvferry.testing.conformance.base import Conformance, needs
from kvferry.testing.conformance.eviction_driver import PolicyDriver, Resident, highest, live
from kvferry.testing.conformance.subject import load_plugin
from kvferry.testing.leaks import LeakGuard
from kvferry.testing.replay import ReplayRequest, optimum, replay

_BUILTIN = "core"
_QUOTA_METHODS = (
    "quota",
    "default_quota",
    "set_default_quota",
    "quotas",
    "set_quota",
    "forget_quota",
    "evict_owned",
)
_WAITING = frozenset(
    {"sleep", "acquire", "select", "poll", "wait", "recv", "recv_into", "accept", "connect", "open", "system"}
)
"""Names of functions of the interpreter that may block. None has a place in a policy."""
_OWNERS = ("", "north", "south")

Make = Callable[[], EvictionPolicy]


class EvictionConformance(Conformance, kit=True):
    """For the policy named ``policy`` of the plugin ``plugin``. Give an ``options`` fixture if the options
    have keys without a default."""

    plugin: ClassVar[str]
    policy: ClassVar[str]
    least_share_of_lru: ClassVar[float] = 0.8
    """The policy finds at least this share of what LRU finds in the kit's trace of conversations. State a
    smaller one for a policy that is meant for other traffic."""

    @pytest.fixture
    def plugins(self) -> LoadedPlugins:
        """The plugin, loaded as core does it."""
        return load_plugins([]) if self.plugin == _BUILTIN else load_plugin(self.plugin)

    @pytest.fixture
    def spec(self, plugins: LoadedPlugins) -> EvictionSpec:
        """The description that is put to the proof."""
        return plugins.eviction(self.policy)

    @pytest.fixture
    def claims(self, spec: EvictionSpec) -> frozenset[str]:
        """``quotas``, if the spec claims it."""
        return frozenset({"quotas"}) if spec.quotas else frozenset()

    @pytest.fixture
    def options(self, plugins: LoadedPlugins) -> Any:
        """The policy's options: the defaults, or None for a policy without any."""
        options_class = plugins.options_class("eviction", self.policy)
        return None if options_class is None else options_class()

    @pytest.fixture
    def make(self, plugins: LoadedPlugins, spec: EvictionSpec, options: Any) -> Make:
        """Makes policies as core does."""
        factory = plugins.factory("eviction", self.policy)
        return lambda: cast("EvictionPolicy", factory() if spec.options is None else factory(options))

    # What may go

    @pytest.mark.parametrize("seed", range(8))
    def test_every_claim_and_every_answer_keeps_the_contract(self, make: Make, seed: int) -> None:
        """It asks for resident chunks only, for none that it has already, and reports what it got: exactly
        enough, or that all that can go is not enough."""
        driver = PolicyDriver(make(), 24)
        live([driver], seed, 400, owners=_OWNERS)
        driver.evict_all()

    @pytest.mark.parametrize("seed", range(4))
    def test_sizes_add_up(self, make: Make, seed: int) -> None:
        """Chunks of different sizes count as what they are."""
        driver = PolicyDriver(make(), 24)
        live([driver], seed, 300, owners=_OWNERS, largest=5)
        driver.evict_all()

    def test_tails_go_before_heads(self, make: Make) -> None:
        """Of a chain the last chunk goes first, however its beginning was used."""
        driver = PolicyDriver(make(), 30)
        for _ in range(3):
            chain = driver.chain(10)
            for length in (1, 4, 9, 4):
                driver.touch(chain[length])
        driver.evict_all()
        gone = [name for names in driver.history for name in names]
        for start in (1, 11, 21):
            chain_names = range(start, start + 10)
            assert [name for name in gone if name in chain_names] == list(reversed(chain_names))

    def test_what_is_in_use_stays_and_can_go_later(self, make: Make) -> None:
        """A refused chunk is no victim, and is found again once the manager says that it is free."""
        driver = PolicyDriver(make(), 20)
        chains = [driver.chain(4) for _ in range(5)]
        for chain in chains[:3]:
            driver.lease(chain[2])
        assert driver.evict(12) == NotEnough(11)
        driver.evict(11)
        assert driver.evict(1) == NotEnough(0)
        left = {resident.name for resident in driver.residents.values()}
        assert left == {resident.name for chain in chains[:3] for resident in chain[:3]}
        for chain in chains[:3]:
            driver.end_lease(chain[2])
        driver.evict(9)
        assert not driver.residents

    def test_too_little_changes_nothing(self, make: Make) -> None:
        """After ``NotEnough`` it goes on as if it had not been asked. (It may have forgotten what is in
        use, so nothing is, here.)"""
        for seed in range(6):
            asked, left_alone = PolicyDriver(make(), 16), PolicyDriver(make(), 16)

            def ask_in_vain(step: int, asked: PolicyDriver = asked) -> None:
                available = asked.available()
                if step % 3 == 0:
                    assert asked.evict(available + 1) == NotEnough(available)

            live([asked, left_alone], seed, 200, ask_in_vain, owners=_OWNERS, largest=2, in_use=False)
            asked.evict_all()
            left_alone.evict_all()
            assert asked.history == left_alone.history

    def test_what_was_refused_in_vain_stands_where_it_stood(self, make: Make) -> None:
        """Chunks in use that it was refused before ``NotEnough`` can go again once it hears of them, and
        then the order is that of a policy that was never asked."""
        for seed in range(6):
            asked, left_alone = PolicyDriver(make(), 16), PolicyDriver(make(), 16)
            _ask_in_vain_while_in_use(asked, left_alone, seed, [None])
            assert asked.history == left_alone.history

    # What it is told

    def test_it_has_room_for_every_id(self, make: Make) -> None:
        """``open`` says how many ids there are, and all of them may come."""
        for entries in (1, 2, 100):
            driver = PolicyDriver(make(), entries, numbering=highest)
            for _ in range(entries):
                driver.insert()
            driver.evict_all()

    def test_ids_are_only_names(self, make: Make) -> None:
        """An id that comes back stands for another chunk, and which one a chunk gets does not matter."""
        for seed in range(6):
            drivers = [PolicyDriver(make(), 16), PolicyDriver(make(), 16, numbering=highest)]
            live(drivers, seed, 250, owners=_OWNERS)
            assert drivers[0].history == drivers[1].history

    def test_many_ids_may_come_as_a_memory_view(self, make: Make) -> None:
        """A memory view of 64-bit integers is as good as a list."""
        drivers = [PolicyDriver(make(), 16), PolicyDriver(make(), 16, views=False)]
        live(drivers, 1, 250, owners=_OWNERS)
        assert drivers[0].history == drivers[1].history

    def test_release_is_not_an_access(self, make: Make) -> None:
        """Being free again changes no order."""
        for seed in range(6):
            told, untold = PolicyDriver(make(), 16), PolicyDriver(make(), 16)

            def tell(step: int, told: PolicyDriver = told) -> None:
                bare = [one for one in told.residents.values() if told.is_bare(one)]
                told.release(bare if step % 2 else bare[::-1])

            live([told, untold], seed, 250, tell, owners=_OWNERS)
            assert told.history == untold.history

    def test_the_same_history_gives_the_same_victims(self, make: Make) -> None:
        """Nothing but what it was told decides."""
        drivers = []
        for _ in range(2):
            drivers.append(PolicyDriver(make(), 16))
            live(drivers[-1:], 5, 300, owners=_OWNERS)
            random.seed(len(drivers))
        assert drivers[0].history == drivers[1].history

    # What it may do

    def test_making_a_policy_has_no_effect(self, make: Make) -> None:
        """The constructor keeps values."""
        make()  # importing may leave what it likes
        guard = LeakGuard()
        kept = [make() for _ in range(3)]
        assert guard.leaks(settle_seconds=0.0) == []
        del kept

    def test_it_has_no_thread_and_waits_for_nothing(self, make: Make) -> None:
        """It is called under the manager's lock, so it computes and returns."""
        guard = LeakGuard()
        driver = PolicyDriver(make(), 16)
        waits: list[str] = []

        def note(_frame: object, event: str, argument: Any) -> None:
            if event == "c_call" and getattr(argument, "__name__", "") in _WAITING:
                waits.append(argument.__name__)

        before = sys.getprofile()
        sys.setprofile(note)
        try:
            live([driver], 3, 150, owners=_OWNERS)
        finally:
            sys.setprofile(before)
        assert waits == []
        assert guard.leaks(settle_seconds=0.0) == []

    def test_chunks_that_go_leave_nothing_behind(self, make: Make) -> None:
        """Memory does not grow with what came and went, nor with the number of owners: evicted, removed
        with all behind it, or one by one from the end, with no eviction that could tidy up."""
        driver = PolicyDriver(make(), 8)

        def evicted_or_dropped(number: int, chain: list[Resident]) -> None:
            if number % 2:
                driver.drop(chain[0])
            else:
                driver.evict(3)

        def dropped_from_the_end(number: int, chain: list[Resident]) -> None:
            for resident in reversed(chain):
                driver.drop(resident)

        for go in (evicted_or_dropped, dropped_from_the_end):
            grown = _growth(driver, go)
            assert grown < 8000, f"{grown} bytes more for 1,500 chunks of 500 owners, {go.__name__}"

    # What it is good for

    def test_it_serves_a_real_manager(self, make: Make, spec: EvictionSpec) -> None:
        """The manager's own audit finds nothing, and the optimum stays out of reach."""
        trace = _conversations(seed=2, requests=150)
        for capacity in (7, 40):
            found = replay(make(), trace, capacity, quotas=spec.quotas).found
            assert found <= optimum(trace, capacity).found

    def test_it_finds_its_share_of_what_lru_finds(self, make: Make, spec: EvictionSpec) -> None:
        """On conversations it is no worse than ``least_share_of_lru`` says."""
        trace = _conversations(seed=1, requests=400)
        found = replay(make(), trace, 120, quotas=spec.quotas).found
        lru = replay(LRU(), trace, 120).found
        assert found >= self.least_share_of_lru * lru, f"{found} chunks were found, {lru} by lru"

    # Quotas

    def test_quotas_that_are_not_claimed_are_not_there(self, make: Make, spec: EvictionSpec) -> None:
        """A policy keeps owners apart and says so, or does neither."""
        policy = make()
        there = [name for name in _QUOTA_METHODS if callable(getattr(policy, name, None))]
        assert there == (list(_QUOTA_METHODS) if spec.quotas else []), "the spec and the class differ"

    @needs("quotas")
    def test_quotas_can_be_given_changed_and_taken_back(self, make: Make) -> None:
        """An owner has its own quota or the default, and only those with their own are listed."""
        policy = cast("QuotaPolicy", make())
        policy.set_quota("kit early", 3)
        policy.open(4)
        assert policy.quota("kit early") == 3
        assert policy.forget_quota("kit early")
        listed = dict(policy.quotas())
        policy.set_default_quota(5)
        policy.set_quota("kit a", 7)
        policy.set_quota("kit b", None)
        policy.set_quota("kit c", 0)
        found = [policy.quota(f"kit {name}") for name in "abcd"]
        assert found == [7, None, 0, 5]
        assert dict(policy.quotas()) == {**listed, "kit a": 7, "kit b": None, "kit c": 0}
        policy.set_default_quota(None)
        assert policy.default_quota() is None
        assert policy.quota("kit d") is None
        assert policy.forget_quota("kit a")
        assert not policy.forget_quota("kit a")
        assert policy.quota("kit a") is None
        assert "kit a" not in policy.quotas()

    @needs("quotas")
    @pytest.mark.parametrize("seed", range(4))
    def test_an_owner_makes_room_among_its_own_chunks(self, make: Make, seed: int) -> None:
        """``evict_owned`` takes of one owner, exactly enough or nothing, and finds all that can go."""
        driver = PolicyDriver(make(), 24)
        random_ = random.Random(seed)

        def make_room(step: int) -> None:
            owner = random_.choice((*_OWNERS, "nobody"))
            driver.evict(random_.randint(0, 4), owner)

        live([driver], seed, 250, make_room, owners=_OWNERS, largest=2)
        driver.evict_all()

    @needs("quotas")
    def test_too_little_of_one_owner_changes_nothing(self, make: Make) -> None:
        """After ``NotEnough`` from ``evict_owned`` it goes on as if it had not been asked."""
        asked, left_alone = PolicyDriver(make(), 16), PolicyDriver(make(), 16)

        def ask_in_vain(step: int) -> None:
            owner = _OWNERS[step % len(_OWNERS)]
            available = asked.available(owner)
            assert asked.evict(available + 1, owner) == NotEnough(available)

        live([asked, left_alone], 4, 250, ask_in_vain, owners=_OWNERS, in_use=False)
        asked.evict_all()
        left_alone.evict_all()
        assert asked.history == left_alone.history

    @needs("quotas")
    def test_what_an_owner_was_refused_in_vain_stands_where_it_stood(self, make: Make) -> None:
        """The same for chunks in use that ``evict_owned`` was refused."""
        asked, left_alone = PolicyDriver(make(), 16), PolicyDriver(make(), 16)
        _ask_in_vain_while_in_use(asked, left_alone, 5, _OWNERS)
        assert asked.history == left_alone.history

    @needs("quotas")
    def test_changing_a_quota_evicts_nothing(self, make: Make) -> None:
        """A quota counts at the next write; what is there stays, and can still go."""
        policy = cast("QuotaPolicy", make())
        driver = PolicyDriver(policy, 12)
        for owner in _OWNERS:
            driver.chain(4, owner)
        for quota in (0, 3, None):
            policy.set_quota("north", quota)
            policy.set_default_quota(quota)
        policy.forget_quota("north")
        assert len(driver.residents) == 12
        driver.evict_all()

    @needs("quotas")
    def test_no_owner_passes_its_quota_or_suffers_from_another(self, make: Make) -> None:
        """With a manager that asks it: whoever stores much loses its own chunks, and nobody else does."""
        policy = cast("QuotaPolicy", make())
        manager = CacheManager(
            capacity=30,
            chunk_tokens=1,
            block_tokens=1,
            policy=policy,
            lease_seconds=1e9,
            write_seconds=1e9,
            quotas=policy,
            slot_bytes=1,
        )
        manager.grow(30)
        manager.set_default_quota(4)
        manager.set_quota("north", 10)
        manager.set_quota("south", 6)
        mine = _store(manager, "south", 0, 6)
        for number in range(1, 8):
            _store(manager, "north", number, 5)
            _store(manager, f"stranger {number % 3}", number, 3)
            held = {usage.owner: usage.held_slots for usage in manager.quota_report().owners}
            assert held["north"] <= 10
            assert manager.touch(mine) == 6, "an owner within its quota lost chunks"
        manager.check()


def _ask_in_vain_while_in_use(
    asked: PolicyDriver, left_alone: PolicyDriver, seed: int, owners: Sequence[str | None]
) -> None:
    """Both live through the same; now and then one is asked for too much, and then all uses end."""
    for part in range(20):
        live([asked, left_alone], 100 * seed + part, 20, owners=_OWNERS, largest=2)
        owner = owners[part % len(owners)]
        available = asked.available(owner)
        assert asked.evict(available + 1, owner) == NotEnough(available)
        asked.end_uses()
        left_alone.end_uses()
    asked.evict_all()
    left_alone.evict_all()


def _growth(driver: PolicyDriver, go: Callable[[int, list[Resident]], None]) -> int:
    """Bytes that stay when 500 chains of three chunks came and went, after as many before them."""

    def come_and_go(first: int) -> None:
        for number in range(first, first + 500):
            chain = driver.chain(3, owner=f"salt {number}")
            driver.touch(chain[-1])
            go(number, chain)
        driver.history.clear()

    come_and_go(0)
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        come_and_go(500)
        gc.collect()
        return tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()


def _store(manager: CacheManager, salt: str, number: int, length: int) -> list[bytes]:
    keys = _chain_of(salt, [(number, depth) for depth in range(length)])
    writes = [ChunkWrite(key, keys[at - 1] if at else None, at, 1, ()) for at, key in enumerate(keys)]
    answer = manager.reserve("kit", salt, writes, 0.0)
    if answer.id is not None:
        granted = [n for n, item in enumerate(answer.items) if item.outcome is WriteOutcome.GRANTED]
        manager.complete(answer.id, granted)
    return keys


def _chain_of(salt: str, chunks: Sequence[object]) -> list[bytes]:
    last, found = salt.encode(), []
    for chunk in chunks:
        last = hashlib.sha256(last + repr(chunk).encode()).digest()
        found.append(last)
    return found


def _conversations(seed: int, requests: int) -> list[ReplayRequest]:
    """20 conversations at once over 3 beginnings; the later ones in the list are talked to rarely, and
    each ends some time."""
    random_ = random.Random(seed)
    talks: list[list[object]] = []
    found: list[ReplayRequest] = []
    while len(found) < requests:
        while len(talks) < 20:
            talks.insert(0, [("system", random_.randrange(3)), ("talk", len(found), len(talks))])
        talk = talks.pop(min(random_.randrange(20), random_.randrange(20)))
        talk += [(len(found), part) for part in range(random_.randint(0, 2))]
        found.append(ReplayRequest(tuple(_chain_of("", talk))))
        if random_.random() < 0.85:
            talks.insert(0, talk)
    return found
