"""Engines in processes that read each other's memory, while some of them are killed, stopped or cut off.

Never a wrong byte, nothing that hangs, nothing left over. Each engine compares every byte that it reads.
"""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from attrs import define

from kvferry.testing.fake_instance import wait_until
from kvferry.testing.tcp_proxy import Direction, TCPProxy
from tests.peers.instances import (
    CHUNK,
    CHUNKS,
    LEASE,
    LOAD,
    LONG,
    Instance,
    Instances,
    controller,
    free_port,
    listening,
    ports,
    prompt,
)

WHOLE = [CHUNKS * CHUNK]
AT_MOST = 10 * LOAD
"""A request whose peers fail goes on at its deadline; the rest is for a busy machine."""
ROUNDS = 10 if os.environ.get("KVFERRY_TEST_LONG") == "1" else 2


@define
class Pair:
    """One that asks and one that is asked; they know each other. With the channel tcp the latter's listeners
    are behind proxies."""

    instances: Instances
    near: Instance
    far: Instance
    prompts: int = 1

    def fresh(self) -> int:
        """The number of a prompt that ``far`` has and ``near`` has read once, and forgotten."""
        self.prompts += 1
        self.far.serve(self.prompts)
        self.instances.until_hit(self.near, self.prompts)
        self.near.ask("forget")
        return self.prompts

    def unheard(self) -> int:
        """That of a prompt that nobody knows."""
        self.prompts += 1
        return self.prompts

    def settle(self) -> None:
        self.near.settle()
        self.far.settle()


@pytest.fixture(scope="module")
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    # A short path: sockets lie in it.
    with tempfile.TemporaryDirectory(prefix="kvf") as folder, ExitStack() as stack:
        url, process = stack.enter_context(controller())
        instances = Instances(Path(folder), stack, request.param, url, process.pid)
        far_ports = ports() if request.param == "tcp" else None
        yield Pair(instances, instances.start("near"), instances.start("far", ports=far_ports))


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test, in the processes that go on."""
    yield
    if "pair" in request.fixturenames:
        request.getfixturevalue("pair").settle()


pytestmark = pytest.mark.may_leave(
    "threads", "descriptors", reason="proxies and processes are there for all tests of a channel"
)
over_tcp = pytest.mark.parametrize("pair", ["tcp"], indirect=True, scope="module")
over_both = pytest.mark.parametrize("pair", ["tcp", "local"], indirect=True, scope="module")


@contextlib.contextmanager
def held_within(proxy: TCPProxy, count: int) -> Iterator[None]:
    """Let so many more bytes pass from the target, and then none, until the end."""
    last = proxy.passed[Direction.FROM_TARGET] + count

    def look(_connection: int, direction: Direction) -> None:
        if direction is Direction.FROM_TARGET and proxy.passed[direction] >= last:
            proxy.from_target.held = True

    proxy.on_bytes = look
    try:
        yield
    finally:
        proxy.on_bytes = lambda connection, direction: None
        proxy.from_target.held = False


def serve_in_time(near: Instance, *numbers: int) -> list[list[int]]:
    began = time.monotonic()
    hits = near.serve(*numbers)
    assert time.monotonic() - began < AT_MOST
    return hits


@over_both
def test_a_peer_that_was_killed_costs_its_hits_and_its_successor_is_read_from(pair: Pair) -> None:
    near, number = pair.near, pair.unheard()
    killed = pair.instances.start("killed")
    killed.serve(number)
    pair.instances.until_hit(near, number)
    before = near.settle()
    near.ask("forget")
    killed.kill()
    assert serve_in_time(near, number) == [[]]
    again = pair.instances.start("killed")
    again.serve(number)
    pair.instances.until_hit(near, number)
    again.settle()
    again.kill()
    # The ways to those that are dead go, like every thread that served them.
    wait_until(lambda: near.settle()["threads"] <= before["threads"], LONG, "threads of one that is dead")
    wait_until(lambda: near.settle()["descriptors"] <= before["descriptors"], LONG, "their descriptors")


@over_tcp
def test_a_peer_that_is_killed_during_a_read_is_a_miss_in_time(pair: Pair) -> None:
    near, number = pair.near, pair.unheard()
    killed = pair.instances.start("killed-within", ports=ports())
    killed.serve(number)
    pair.instances.until_hit(near, number)
    near.ask("forget")
    proxy = pair.instances.proxy("killed-within", "channel")
    with held_within(proxy, 300):
        near.tell("serve", prompts=[prompt(number)])
        wait_until(lambda: proxy.from_target.held, LONG, "a read that never began")
        killed.kill()
        for what in ("channel", "p2p"):
            pair.instances.proxy("killed-within", what).cut()
        assert near.answer(AT_MOST)["hits"] == [[]]
    near.ask("forget")
    assert serve_in_time(near, number) == [[]]


@over_tcp
def test_a_peer_stopped_for_longer_than_its_lease_overwrites_nothing_when_it_goes_on(pair: Pair) -> None:
    near, far, number = pair.near, pair.far, pair.fresh()
    proxy = pair.instances.proxy("far", "channel")
    others = [pair.unheard() for _ in range(7)]
    with held_within(proxy, 300):
        near.tell("serve", prompts=[prompt(number)])
        wait_until(lambda: proxy.from_target.held, LONG, "a read that never began")
        far.stop()
        assert near.answer(AT_MOST)["hits"] == [[]]
        # Its slots are others' by now; then what was on its way comes.
        near.serve(*others)
        time.sleep(LEASE)
    far.go_on()
    for _ in range(3):
        near.serve(*others)
    pair.settle()
    pair.fresh()


@over_both
def test_an_asker_stopped_for_longer_than_its_lease_takes_nothing_that_it_read_too_late(pair: Pair) -> None:
    near, far = pair.near, pair.far
    for turn in range(ROUNDS):
        number = pair.fresh()
        with ExitStack() as stack:
            if pair.instances.channel == "tcp":
                proxy = pair.instances.proxy("far", "channel")
                stack.enter_context(held_within(proxy, 300))
                near.tell("serve", prompts=[prompt(number)])
                wait_until(lambda proxy=proxy: proxy.from_target.held, LONG, "a read that never began")
            else:
                near.tell("serve", prompts=[prompt(number)])
                time.sleep(0.004 * turn)
            near.stop()
            # What it was lent is somebody else's when it goes on.
            time.sleep(LEASE * 1.2)
            far.ask("forget")
            far.serve(*(pair.unheard() for _ in range(16)))
        near.go_on()
        near.answer()
        near.serve(number)


@over_tcp
def test_a_network_that_cuts_delays_and_stands_still_costs_hits_alone(pair: Pair) -> None:
    near, number = pair.near, pair.fresh()
    for what in ("channel", "p2p"):
        proxy = pair.instances.proxy("far", what)
        proxy.from_target.delay_seconds = proxy.to_target.delay_seconds = 0.02
        serve_in_time(near, number)
        proxy.from_target.delay_seconds = proxy.to_target.delay_seconds = 0.0
        for length in (0, 400):
            proxy.from_target.cut_after = length
            near.ask("forget")
            serve_in_time(near, number)
            proxy.from_target.cut_after = None
        proxy.hold()
        near.ask("forget")
        assert serve_in_time(near, number) == [[]]
        proxy.hold(held=False)
        pair.instances.until_hit(near, number)


@over_tcp
def test_a_done_that_is_lost_costs_a_lease_until_its_time_and_no_longer(pair: Pair) -> None:
    near, far, number = pair.near, pair.far, pair.fresh()
    pair.settle()
    proxy = pair.instances.proxy("far", "p2p")

    def lose_the_rest(_connection: int, direction: Direction) -> None:
        # All that near says from the answer on is lost.
        if direction is Direction.FROM_TARGET:
            proxy.to_target.swallowed = True

    proxy.on_bytes = lose_the_rest
    try:
        assert serve_in_time(near, number) == [WHOLE]
        near.settle()
        assert far.state()["lent"] == 1
        far.settle()
    finally:
        proxy.on_bytes = lambda connection, direction: None
        proxy.to_target.swallowed = False
        proxy.cut()
    pair.fresh()


@over_tcp
def test_an_instance_that_starts_anew_with_its_id_and_its_ports_is_read_from(pair: Pair) -> None:
    here, near = ports(), pair.near
    for _ in range(2):
        number = pair.unheard()
        again = pair.instances.start("again", ports=here)
        again.serve(number)
        pair.instances.until_hit(near, number)
        again.kill()
        for what in here:
            pair.instances.proxy("again", what).cut()
    near.ask("forget")
    assert serve_in_time(near, number) == [[]]


@over_tcp
def test_of_two_instances_with_one_id_the_first_is_found_and_both_serve(pair: Pair) -> None:
    near, ours, theirs = pair.near, pair.unheard(), pair.unheard()
    first, second = pair.instances.start("twin"), pair.instances.start("twin")
    first.serve(ours)
    second.serve(theirs)
    pair.instances.until_hit(near, ours)
    assert near.serve(theirs) == [[]]
    # The one that is not taken in reads from others all the same.
    pair.instances.until_hit(second, pair.fresh())
    for each in (first, second):
        each.settle()
        each.kill()


@over_both
def test_twenty_requests_at_once_for_one_prefix_are_all_answered(pair: Pair) -> None:
    near, number = pair.near, pair.fresh()
    before = near.settle()["counts"]["granted"]
    hits = serve_in_time(near, *[number] * 20)
    assert WHOLE in hits
    assert near.state()["counts"]["granted"] == before + 1


@over_both
def test_requests_that_end_at_any_moment_leave_nothing(pair: Pair) -> None:
    near, number = pair.near, pair.fresh()
    for seconds in (0.0, 0.002, 0.01, 0.03):
        near.ask("forget")
        near.ask("abort", prompt=prompt(number), seconds=seconds)
    if pair.instances.channel == "tcp":
        near.ask("forget")
        with held_within(pair.instances.proxy("far", "channel"), 300):
            near.ask("abort", prompt=prompt(number), seconds=0.2)
    pair.settle()
    pair.instances.until_hit(near, number)


@over_tcp
def test_another_size_of_chunks_is_never_read_from(pair: Pair) -> None:
    number = pair.fresh()
    other = pair.instances.start("other", chunk=2 * CHUNK)
    assert serve_in_time(other, number) == [[]]
    assert serve_in_time(pair.near, number) == [WHOLE]
    other.settle()
    other.kill()


@over_tcp
def test_a_controller_that_cannot_be_heard_is_a_miss_in_time_and_found_again(pair: Pair) -> None:
    number = pair.fresh()
    host, port = pair.instances.url.removeprefix("tcp://").split(":")
    with TCPProxy((host, int(port))) as proxy:
        apart = pair.instances.start("apart", url=f"tcp://127.0.0.1:{proxy.address[1]}")
        pair.instances.until_hit(apart, number)
        apart.ask("forget")
        proxy.hold()
        assert serve_in_time(apart, number) == [[]]
        proxy.hold(held=False)
        proxy.cut()
        pair.instances.until_hit(apart, number)
        apart.settle()
        apart.kill()


def test_after_a_restart_of_the_controller_hits_come_back() -> None:
    with tempfile.TemporaryDirectory(prefix="kvf") as folder, ExitStack() as stack:
        port = free_port()
        url = f"tcp://127.0.0.1:{port}"
        instances = Instances(Path(folder), stack, "tcp", url)
        with controller(port) as (_, first):
            near, far = instances.start("near"), instances.start("far")
            far.serve(1)
            instances.until_hit(near, 1)
            first.kill()
        near.ask("forget")
        assert serve_in_time(near, 1) == [[]]
        far.serve(2)
        with controller(port):
            instances.until_hit(near, 1)
            instances.until_hit(near, 2)
            near.settle()
            far.settle()


GARBAGE = (
    b"",
    b"\x00" * 100,
    b"GET / HTTP/1.1\r\n\r\n",
    bytes(range(256)) * 64,
    # A greeting of ZeroMQ, and then a frame that is longer than anything.
    b"\xff" + b"\x00" * 8 + b"\x7f\x03\x00NULL" + b"\x00" * 48 + b"\x02" + b"\xff" * 8 + b"x" * 100,
    b"\xff\xff\xff\x7f" + b"y" * 1000,
    # Half a greeting, and half a frame.
    b"\xff" + b"\x00" * 4,
    b"\x10\x00\x00\x00KV",
)


@over_both
def test_garbage_at_every_socket_that_is_listened_at_hurts_nobody(pair: Pair) -> None:
    number = pair.fresh()
    before = [each.settle() for each in (pair.near, pair.far)]
    sockets = listening([pair.near.process.pid, pair.far.process.pid, pair.instances.controller])
    assert {family for family, _, _ in sockets} == {socket.AF_INET, socket.AF_UNIX}
    with ExitStack() as stack:
        for family, kind, address in sockets:
            for garbage in GARBAGE:
                sock = stack.enter_context(socket.socket(family, kind))
                sock.settimeout(5.0)
                sock.connect(address)
                with contextlib.suppress(OSError):  # it may have been cut in the middle
                    sock.sendall(garbage)
        assert serve_in_time(pair.near, number) == [WHOLE]
    pair.near.ask("forget")
    assert serve_in_time(pair.near, number) == [WHOLE]

    def back() -> bool:
        states = [each.state() for each in (pair.near, pair.far)]
        return all(
            now["descriptors"] <= then["descriptors"] for now, then in zip(states, before, strict=True)
        )

    wait_until(back, LONG, "descriptors that never came back")
