"""Peers are answered by many threads while the scheduler works, and never with a slot that is given away."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

from core.tests.control.test_hierarchy_machine import visible
from core.tests.control.test_serving_peers import CHUNK, key, make_manager, store, writes
from kvferry.api import Grant, PeerAsk, PeerDesk, PeerId
from kvferry.control.serving import Serving, ServingSettings
from kvferry.runtime.fair_lock import FairLock
from kvferry.runtime.lending import Lending

PEERS = 4
ROUNDS = 60
CHUNKS = 200


class World:
    """One manager with its lock, and a clock that stands still unless it is moved."""

    def __init__(self, slots: int) -> None:
        self.now = 0.0
        self.lock = FairLock()
        self.manager = make_manager(slots)
        self.memory: dict[int, bytes] = {}
        made = ServingSettings(lease_seconds=10.0, longest_seconds=30.0, most_leases=64, share=1.0)
        self.serving = Serving(self.manager, made)
        self.woken = threading.Event()
        self.desk: PeerDesk = Lending(self.serving, self.lock, lambda: self.now, self.woken.set)

    def store(self, name: str, chunks: int) -> None:
        with self.lock:
            self.memory |= store(self.manager, writes(name, chunks), self.now)


def question(number: int, name: str, chunks: int) -> PeerAsk:
    keys = tuple(key(name, depth) for depth in range(chunks))
    return PeerAsk(number=number, keys=keys, limit_tokens=chunks * CHUNK)


def all_at_once(works: list[Callable[[], None]]) -> None:
    failures: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - it is raised in the test's own thread
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def test_what_is_lent_stays_while_the_scheduler_stores_and_evicts() -> None:
    world = World(12)
    ended = threading.Event()
    lent = [0] * PEERS

    def scheduler() -> None:
        chance = random.Random(0)
        for _ in range(PEERS * ROUNDS):
            world.store(chance.choice("pqrs"), chance.randint(1, 6))
        ended.set()

    def peer(place: int) -> Callable[[], None]:
        me = PeerId(f"peer {place}", bytes(16))
        chance = random.Random(place + 1)

        def work() -> None:
            number = 0
            while not ended.is_set() or number < ROUNDS:
                number += 1
                answer = world.desk.ask(me, question(number, chance.choice("pqrs"), chance.randint(1, 6)))
                if isinstance(answer, Grant):
                    for chunk, slot in zip(answer.chunks, answer.slots, strict=True):
                        assert world.memory[slot] == chunk.digest
                    lent[place] += 1
                    if chance.random() < 0.3:
                        assert world.desk.renew(me, number) == 10.0
                    for chunk, slot in zip(answer.chunks, answer.slots, strict=True):
                        assert world.memory[slot] == chunk.digest, "it was given away while it was lent"
                world.desk.done(me, number)

        return work

    all_at_once([scheduler, *(peer(place) for place in range(PEERS))])
    assert all(lent), "somebody was lent nothing"
    assert world.serving.leases == world.serving.slots == 0
    world.manager.check()
    assert all(world.memory[slot] == digest for digest, slot in visible(world.manager).items())


def test_a_long_question_lets_others_in() -> None:
    world = World(CHUNKS)
    world.store("p", CHUNKS)
    holds: list[float] = []

    class Watched(FairLock):
        def __enter__(self) -> None:
            super().__enter__()
            holds.append(world.now)

    lock = Watched()
    desk = Lending(world.serving, lock, lambda: world.now, world.woken.set)
    answer = desk.ask(PeerId("a", bytes(16)), question(1, "p", CHUNKS))
    assert isinstance(answer, Grant)
    assert len(answer.chunks) == CHUNKS
    assert len(holds) > 2, "the whole question was one hold of the lock"


def test_a_lease_ends_by_its_time_and_whoever_waits_is_told_when() -> None:
    world = World(12)
    world.store("p", 3)
    me = PeerId("a", bytes(16))
    desk = world.desk
    assert isinstance(desk, Lending)
    assert desk.next_deadline() == float("inf")
    assert isinstance(desk.ask(me, question(1, "p", 3)), Grant)
    assert world.woken.is_set()
    assert desk.next_deadline() == 10.0
    world.now = 10.0
    desk.expire()
    assert world.serving.leases == 0
    assert desk.renew(me, 1) == 0.0
