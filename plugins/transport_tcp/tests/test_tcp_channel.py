"""What the options do, and what opening tells when it cannot be done."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest

from kvferry.api import ChannelContext, ErrorKind, KVFerryError, MemoryKind, Region
from kvferry.testing.leaks import LeakGuard
from kvferry_transport_tcp.channel import TCPChannel
from kvferry_transport_tcp.export import Export
from kvferry_transport_tcp.options import TCPOptions
from plugins.transport_tcp.tests.tcp_sides import Side, assert_serves, kind_of, sides


def context(**facts: Any) -> ChannelContext:
    return ChannelContext(name="tcp", instance="test", epoch=os.urandom(16), **facts)


def told(**options: Any) -> str:
    """What peers are told of where it listens."""
    side = Side(1000, **options)
    try:
        return str(Export.parse(side.channel.export()).address)
    finally:
        side.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_it_listens_at_loopback_unless_told_to() -> None:
    assert told().startswith("127.0.0.1:")


def test_each_rank_listens_at_its_own_address() -> None:
    ports = [free_port(), free_port()]
    listen = [f"127.0.0.1:{port}" for port in ports]
    assert told(listen=listen, rank=1) == listen[1]


def test_one_address_with_port_0_serves_all_ranks() -> None:
    sides = [Side(1000, listen=["127.0.0.1:0"], rank=rank) for rank in (0, 1)]
    assert sides[0].address != sides[1].address
    for side in sides:
        side.close()


@pytest.mark.parametrize("listen", [["127.0.0.1:1"], ["127.0.0.1:1", "127.0.0.1:2"]])
def test_ranks_without_an_address_are_refused(listen: list[str]) -> None:
    channel = TCPChannel(TCPOptions(listen=listen))
    assert kind_of(lambda: channel.open(context(rank=2, world_size=3))) is ErrorKind.CONFIG


def test_peers_are_told_the_address_that_is_advertised() -> None:
    assert told(advertise=["10.1.2.3:77"]) == "10.1.2.3:77"
    host, _, port = told(advertise=["10.1.2.3:0"]).rpartition(":")
    assert host == "10.1.2.3"
    assert int(port) > 0


def test_who_listens_everywhere_tells_an_address_that_can_be_reached() -> None:
    with sides(listen=["0.0.0.0:0"], secret_variable="SECRET") as (near, far):
        assert far.address[0] != "0.0.0.0"
        assert_serves(near, far)


def test_a_port_that_is_taken_is_told_and_leaves_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        guard = LeakGuard()
        channel = TCPChannel(TCPOptions(listen=[f"127.0.0.1:{server.getsockname()[1]}"]))
        with pytest.raises(KVFerryError, match="EADDRINUSE") as caught:
            channel.open(context())
        assert caught.value.kind is ErrorKind.IO
        assert guard.leaks() == []


@pytest.mark.parametrize("variables", [{}, {"SECRET": ""}])
def test_a_secret_that_is_not_there_is_told(variables: dict[str, str]) -> None:
    channel = TCPChannel(TCPOptions(secret_variable="SECRET"))
    assert kind_of(lambda: channel.open(context(variables=variables))) is ErrorKind.CONFIG


@pytest.mark.parametrize(
    "options",
    [
        {"listen": []},
        {"listen": ["10.0.0.1"]},
        {"listen": ["10.0.0.1:99999"]},
        {"listen": ["::1:9960"]},
        {"listen": ["[10.0.0.1]:9960"]},
        {"listen": [":9960"]},
        {"listen": ["a b:1"]},
        {"advertise": ["0.0.0.0:1"]},
        {"advertise": ["x"]},
        {"connections": 0},
        {"connections": 65},
        {"secret_variable": "A=B"},
        {"secret_variable": "my secret"},
    ],
    ids=str,
)
def test_options_that_cannot_be_used_are_refused_with_a_remedy(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"\w") as caught:
        TCPOptions(**options)
    assert getattr(caught.value, "remedy", "")


def test_memory_that_sockets_cannot_reach_is_refused() -> None:
    side = Side(1000)
    for region, kind in (
        (Region(name="d", address=1, length=8, kind=MemoryKind.DEVICE), ErrorKind.UNSUPPORTED),
        (Region(name="n" * 2000, address=1, length=8), ErrorKind.CAPACITY),
    ):
        assert kind_of(lambda region=region: side.channel.register(region)) is kind  # type: ignore[misc]
    side.close()
