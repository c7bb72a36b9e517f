"""What may happen at any moment: clients, peers, operators, and trouble that nobody asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvferry.runtime.requests import RequestOptions
from tests.simulation.peers import Fetch, Peer
from tests.simulation.quotas import SLOT_BYTES
from tests.simulation.truth import BLOCK, CHUNK
from tests.simulation.wishes import Listener

if TYPE_CHECKING:
    from tests.simulation.world import World

MOST_FETCHES = 6
MOST_FACTS = 64
OPERATED = ("", "red", "blue", "stranger")
"""Owners whose quotas operators change, one that never comes among them."""


class Happenings:
    """Lets one thing or another happen to a world, some of them more often."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._listener = Listener(world.coverage)
        self._deaf_until = 0.0

    def something(self) -> None:
        random = self.world.loop.random
        choices: Sequence[tuple[float, Callable[[], object]]] = (
            (20, self._client),
            (34, self._peer),
            (14, self._fetch),
            (2, lambda: self.world.manager.evict(random.randrange(1, 4))),
            (3, self._touch),
            (4, self._pin),
            (6, self._quota),
            (2.5, self._drop),
            (0.4, self._clear),
            (8, self._stale_call),
            (6, self._abort),
            (4, self._preempt),
            (0.3, self._silence),
            (0.5, self.world.worker_fails),
            (0.4, self._leap),
            (2.5, self.world.tiers.trouble),
            (0.5, self._new_weights),
        )
        action = random.choices([c[1] for c in choices], [c[0] for c in choices])[0]
        action()

    def _prompt(self, text_tokens: int) -> int:
        return self.world.loop.random.randrange(1, text_tokens + 1)

    def _client(self) -> None:
        if self.world.engine is None or len(self.world.engine.waiting) >= self.world.engine.most_waiting:
            return
        random = self.world.loop.random
        text = self.world.truth.draw(random)
        total = random.randrange(2, len(text.tokens) + 1)
        prompt = max(1, total - random.randrange(1, 6))
        options = RequestOptions(store=random.random() < 0.95, load=random.random() < 0.95)
        self.world.engine.arrive(text, prompt, total, options)

    def _peer(self) -> None:
        text = self.world.truth.draw(self.world.loop.random)
        Peer(
            self.world.surroundings, f"peer-{self.world.numbers.next()}", text, self._prompt(len(text.tokens))
        ).start()

    def _fetch(self) -> None:
        under_way = sum(not fetch.over for fetch in self.world.fetches.values())
        if under_way >= MOST_FETCHES or not all(rank.alive for rank in self.world.ranks):
            return
        text = self.world.truth.draw(self.world.loop.random)
        blocks = self.world.loop.random.randrange(1, min(len(text.blocks), 12) + 1)
        first = self.world.loop.random.choice((0, 0, 0, 1, 2))
        if first * CHUNK >= blocks * BLOCK:
            first = 0
        number = self.world.numbers.next()
        ttl = self.world.loop.random.choice((None, None, 1.0, 4.0, 12.0))
        fetch = Fetch(self.world.surroundings, number, text, first, blocks * BLOCK, ttl)
        self.world.fetches[number] = fetch
        fetch.start()
        if ttl is not None:
            # Somebody asks just when the chunks come to their end.
            peer = Peer(self.world.surroundings, f"peer-{self.world.numbers.next()}", text, blocks * BLOCK)
            self.world.loop.after(ttl + self.world.loop.random.uniform(-0.2, 0.4), "late peer", peer.start)
        for old in [n for n, known in self.world.fetches.items() if known.over and n < number - 100]:
            del self.world.fetches[old]

    def _touch(self) -> None:
        keys = self.world.truth.draw(self.world.loop.random).keys
        self.world.manager.touch(keys[self.world.loop.random.choice((0, 0, 1)) :])

    def _drop(self) -> None:
        self.world.loop.fault("bytes proved bad")
        text = self.world.truth.draw(self.world.loop.random)
        digests = [*text.keys, *(digest for tails in text.tails for digest, _ in tails)]
        self.world.manager.drop(self.world.loop.random.sample(digests, min(len(digests), 2)))

    def _pin(self) -> None:
        random, manager = self.world.loop.random, self.world.manager
        name = f"pin-{random.randrange(6)}"
        fate = random.random()
        if fate < 0.7:
            text = self.world.truth.draw(random)
            digest = random.choice([*text.keys[:4], *(digest for digest, _ in text.tails[0])])
            manager.pin(text.identity.salt, name, digest, random.uniform(0.5, 6.0), self.world.clock())
        elif fate < 0.85:
            manager.extend_pin(name, random.uniform(0.5, 6.0), self.world.clock())
        else:
            manager.unpin(name)

    def _quota(self) -> None:
        """An operator changes what owners may hold, and mostly wants it to be true at once."""
        random, manager = self.world.loop.random, self.world.manager
        if not manager.has_quotas:
            return
        owner = random.choice(OPERATED)
        quota = random.choice((None, 0, *[random.randrange(self.world.settings.slots * SLOT_BYTES)] * 6))
        fate = random.random()
        if fate < 0.5:
            manager.set_quota(owner, quota)
        elif fate < 0.8:
            manager.forget_quota(owner)
        elif fate < 0.9:
            manager.set_default_quota(quota)
        if fate > 0.9 or self.world.loop.chance(0.5):
            self._enforce(random.choice((owner, None)))

    def _enforce(self, owner: str | None) -> None:
        """At once, or in slices between which anything may happen."""
        cursor = self.world.manager.enforce_quotas(owner)
        if self.world.loop.chance(0.5):
            while cursor.advance(self.world.loop.random.choice((1, 3, 16))):
                pass
            self.world.manager.quota_model.enforced(owner)
            return

        def advance() -> None:
            if cursor.advance(2):
                self.world.loop.after(0.001, "quota slice", advance)

        advance()

    def listen(self) -> None:
        """Whoever keeps an index of this cache hears the news, or has no time for them."""
        random, manager = self.world.loop.random, self.world.manager
        if self.world.loop.now < self._deaf_until:
            return
        if self.world.loop.chance(0.03):
            self.world.loop.fault("deaf listener")
            self._deaf_until = self.world.loop.now + random.uniform(0.5, 9.0)
            return
        self._listener.listen(manager.take_events, random.choice((5, MOST_FACTS, MOST_FACTS)))
        if manager.events_behind and manager.tell(self.world.truth.draw(random).keys, 0, lambda index: index):
            self.world.coverage.wish("told: caught up")
            return
        events = manager._residency.events
        if events is not None and not len(events):
            self._listener.check(manager._residency)

    def _clear(self) -> None:
        salt = self.world.loop.random.choice(("", "red", "blue", "red", "blue", None))
        if self.world.loop.chance(0.5):
            self.world.coverage.wish("clear: in slices")
            cursor = self.world.manager.clear_in_slices(salt)

            def advance() -> None:
                if cursor.advance(2):
                    self.world.loop.after(0.001, "clear slice", advance)

            advance()
            return
        limit = self.world.loop.random.choice((None, 2))
        while True:
            gone = self.world.manager.clear(salt, limit)
            if limit is None or not gone.removed + gone.kept:
                return

    def _stale_call(self) -> None:
        """A message about a lease that ended long ago, or that never was."""
        self.world.loop.fault("stale call")
        manager, random = self.world.manager, self.world.loop.random
        number = random.choice(manager.ended) if manager.ended and random.random() < 0.8 else 10**9
        given_up = [n for n, write in manager.writes.items() if write.given_up]
        if given_up and random.random() < 0.3:
            manager.renew(random.choice(given_up), self.world.clock())
            return
        call = random.choice(
            (
                manager.release,
                manager.begin_load,
                manager.finish_load,
                manager.abandon,
                lambda n: manager.renew(n, self.world.clock()),
                lambda n: manager.complete(n, ()),
                lambda n: manager.release_owner("nobody"),
            )
        )
        call(number)

    def _abort(self) -> None:
        if self.world.engine is not None:
            self.world.engine.abort_one()

    def _preempt(self) -> None:
        if self.world.engine is not None:
            self.world.engine.preempt_one()

    def _silence(self) -> None:
        if self.world.ranks:
            self.world.loop.fault("silent worker")
            rank = self.world.loop.random.choice(self.world.ranks)
            rank.silent_until = self.world.loop.now + self.world.loop.random.uniform(5.0, 25.0)

    def _leap(self) -> None:
        self.world.loop.fault("clock leap")
        self.world.loop.leap(self.world.loop.random.uniform(0.5, 8.0))

    def _new_weights(self) -> None:
        if self.world.engine is not None:
            self.world.engine.reset_soon()
