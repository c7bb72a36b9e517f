"""Pulls, cancels, hellos, farewells, restarts and closings in any order: each pull ends once, as it ought."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from core.tests.data.peer_sides import LONG, Rank, Want
from kvferry.control.orders import ItemFault
from kvferry.data.wire import OpenChannel
from kvferry.testing.fake_instance import wait_until
from kvferry.testing.faults import (
    Delay,
    DoubleCompletion,
    Drop,
    Fail,
    Fault,
    FaultPlan,
    LoseCompletion,
    ReorderCompletion,
    Stall,
)
from kvferry.testing.memory_channel import MemoryNetwork

SLOTS = 12
PEERS = ("a-peer", "other-peer")
HARMLESS = (Stall(), DoubleCompletion(), ReorderCompletion(), Delay(0.0))
HARMFUL = (Fail(), Drop(), LoseCompletion())


class PeerSideMachine(RuleBasedStateMachine):
    """One rank and two peers. Reads stall until they are released, are told of twice or late, fail, or are
    never told of. Slots of pulls under way are not given to others."""

    @initialize(
        faults=st.dictionaries(st.integers(1, 12), st.sampled_from([*HARMLESS, *HARMFUL]), max_size=8),
        refused=st.sets(st.integers(1, 6), max_size=2),
    )
    def start(self, faults: dict[int, Any], refused: set[int]) -> None:
        self.network = MemoryNetwork()
        plan = FaultPlan(
            [Fault("read", effect, nth) for nth, effect in faults.items()]
            + [Fault("connect", Fail(), nth) for nth in refused]
        )
        self.sure = not refused and not set(faults.values()) & set(HARMFUL)
        self.near = Rank(self.network, slots=SLOTS, plan=plan).open()
        self.peers = {name: Rank(self.network, name, slots=SLOTS).open() for name in PEERS}
        self.past: list[Rank] = []
        self.met: dict[str, Rank] = {}
        self.is_open = True
        self.numbers = 0
        self.undisturbed: dict[int, Rank] = {}
        """Pulls to which nothing happened that may make them fail."""
        self.targets: dict[int, set[int]] = {}

    def _disturb(self, peer: Rank | None = None) -> None:
        self.undisturbed = {
            number: each for number, each in self.undisturbed.items() if peer is not None and each is not peer
        }

    @rule()
    def open(self) -> None:
        if not self.is_open:
            self.near.open()
            self.is_open = True
        else:
            before = len(self.near.opened)
            self.near.side.take(OpenChannel(self.near.name, self.near.epoch))
            wait_until(lambda: len(self.near.opened) > before, LONG, "an answer")
            assert self.near.opened[-1] == self.near.epoch

    @precondition(lambda self: self.is_open)
    @rule()
    def close(self) -> None:
        self._disturb()
        self.near.close()
        assert self.near.under_way() == set()
        self.met.clear()
        self.is_open = False

    @rule(name=st.sampled_from(PEERS))
    def meet(self, name: str) -> None:
        peer, known = self.peers[name], self.met.get(name)
        if known is not None and known is not peer:
            self._disturb(known)
        self.near.meet(peer)
        if self.is_open:
            self.met[name] = peer

    @rule(name=st.sampled_from(PEERS))
    def forget(self, name: str) -> None:
        peer = self.peers[name]
        self.near.forget(peer)
        if self.met.get(name) is peer:
            self._disturb(peer)
            del self.met[name]

    @rule(name=st.sampled_from(PEERS))
    def restart(self, name: str) -> None:
        self._disturb(self.peers[name])
        self.past.append(self.peers[name])
        self.peers[name].stop()
        self.peers[name] = Rank(self.network, name, slots=SLOTS).open()

    @rule(
        name=st.sampled_from(PEERS),
        earlier=st.booleans(),
        chunks=st.lists(st.tuples(st.sampled_from([4, 12, 16]), st.integers(0, SLOTS - 1)), max_size=3),
        seconds=st.sampled_from([LONG, LONG, LONG, 0.0]),
    )
    def pull(self, name: str, earlier: bool, chunks: list[tuple[int, int]], seconds: float) -> None:
        taken = {slot for number in self.near.under_way() for slot in self.targets[number]}
        free = [slot for slot in range(SLOTS) if slot not in taken]
        wanted: list[Want] = [(*chunk, slot) for chunk, slot in zip(chunks, free, strict=False)]
        past = [rank for rank in self.past if rank.name == name]
        peer = past[-1] if earlier and past else self.peers[name]
        self.numbers += 1
        number = self.numbers
        self.targets[number] = {slot for _, _, slot in wanted}
        self.near.pull(number, peer, wanted, seconds)
        places = set(range(len(wanted)))
        if not self.is_open:
            assert self.near.done_pulls[number][0] == dict.fromkeys(places, ItemFault.CANCELLED)
        elif self.met.get(name) is not peer:
            assert self.near.done_pulls[number][0] == dict.fromkeys(places, ItemFault.GONE)
        elif seconds and peer is self.peers[name]:
            self.undisturbed[number] = peer

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, self.numbers))
        self.undisturbed.pop(number, None)
        self.near.cancel(number)

    @precondition(lambda self: self.is_open)
    @rule()
    def go_on(self) -> None:
        self.near.channels[-1].release()
        self.near.channels[-1].poll()

    @precondition(lambda self: self.sure)
    @rule()
    def let_all_end(self) -> None:
        """Where nothing is broken, whatever was not disturbed arrives."""

        def ended() -> bool:
            if self.is_open:
                self.near.channels[-1].release()
                self.near.channels[-1].poll()
            return set(self.undisturbed) <= set(self.near.done_pulls)

        wait_until(ended, LONG, "pulls without an end")
        for number in self.undisturbed:
            assert self.near.done_pulls[number] == ({}, "")

    @invariant()
    def nothing_is_told_twice(self) -> None:
        assert self.near.told == []

    def teardown(self) -> None:
        if hasattr(self, "near"):
            if self.sure:
                self.let_all_end()
            self.near.stop()
            assert set(self.near.done_pulls) == set(range(1, self.numbers + 1))
            for peer in self.peers.values():
                peer.stop()


def test_every_pull_ends_once_and_as_it_should() -> None:
    run_state_machine_as_test(
        PeerSideMachine, settings=settings(max_examples=60, stateful_step_count=25, deadline=None)
    )
