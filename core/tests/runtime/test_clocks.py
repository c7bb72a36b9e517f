"""Deadlines are times of the scheduler's clock, and workers' clocks may be any amount ahead of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from core.tests.runtime.sharing_world import CHUNK, World, prompt, serve
from kvferry.data.wire import WIRE_VERSION, Hello, Ready
from kvferry.runtime.address import MeetingPlace
from kvferry.runtime.side_channel import SideChannelClient, SideChannelServer
from kvferry.testing.fake_instance import wait_until

LONG = 10.0
DAY = 86400.0


def shifted(seconds: float) -> Callable[[], float]:
    return lambda: time.monotonic() + seconds


@pytest.fixture
def world(folder: Path) -> Iterator[World]:
    with ExitStack() as stack:
        yield World(folder, stack)


def test_a_worker_is_told_how_far_its_clock_is_ahead_and_never_more(folder: Path) -> None:
    place = MeetingPlace("one", str(folder), {})
    leads: list[float] = []
    clocks = iter((1030.0, 1031.0))
    said: list[object] = []
    server = SideChannelServer(
        place.endpoint,
        place.claim(),
        lambda message: said.append(message),
        lambda: None,
        clock=lambda: 1000.0,
    )
    client = SideChannelClient(
        place.endpoint,
        "0-1",
        place.read_token,
        lambda token: Hello(WIRE_VERSION, token, 0, 1, 1, "", 8, 1, next(clocks)),
        lambda: Ready(0, 1, 8, next(clocks)),
        lambda reason: None,
        on_lead=leads.append,
    )
    try:
        server.open()
        client.open()
        wait_until(lambda: leads == [30.0], LONG, "a lead with the welcome")
        client.send(Ready(0, 1, 8, 1029.0))  # it was on its way for two seconds
        wait_until(lambda: leads == [30.0, 29.0], LONG, "a lead for every word")
    finally:
        client.close()
        server.close()
        place.release()


@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("seconds", [-DAY, DAY])
def test_chunks_come_in_time_whatever_the_clocks_say(world: World, delay: bool, seconds: float) -> None:
    near = world.open("near", clock=shifted(seconds), delay=delay)
    far = world.open("far", clock=shifted(-2 * seconds))
    serve(far, prompt(1))
    assert serve(near, prompt(1)) == [4 * CHUNK]
    world.settle(near, far)
