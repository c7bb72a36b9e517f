"""The proxy does to a connection what it is told, and nothing else."""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
from collections.abc import Iterator

import pytest

from kvferry.testing.tcp_proxy import Direction, TCPProxy

DATA = bytes(range(256)) * 40


@pytest.fixture
def echo() -> Iterator[tuple[str, int]]:
    """A server that sends back what it gets."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    sock, _ = server.accept()
                except OSError:
                    return
                with sock:
                    try:
                        while data := sock.recv(4096):
                            sock.sendall(data)
                    except OSError:
                        pass

        thread = threading.Thread(target=serve)
        thread.start()
        yield server.getsockname()
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.fixture
def proxy(echo: tuple[str, int]) -> Iterator[TCPProxy]:
    with TCPProxy(echo) as proxy:
        yield proxy


@pytest.fixture
def client(proxy: TCPProxy) -> Iterator[socket.socket]:
    with socket.create_connection(proxy.address, timeout=20.0) as sock:
        yield sock


def answer(sock: socket.socket) -> bytes:
    """What comes back of the data, until the end or a reset, which may come before all is sent."""
    found = bytearray()
    try:
        sock.sendall(DATA)
        sock.shutdown(socket.SHUT_WR)
        while data := sock.recv(4096):
            found += data
    except OSError as error:
        if error.errno not in (errno.ECONNRESET, errno.EPIPE, errno.ENOTCONN):
            raise
    return bytes(found)


def test_without_faults_all_bytes_and_the_end_pass(proxy: TCPProxy, client: socket.socket) -> None:
    assert answer(client) == DATA
    assert proxy.accepted == 1
    assert proxy.passed == {direction: len(DATA) for direction in Direction} == proxy.received


def test_small_pieces_are_the_same_bytes(proxy: TCPProxy, client: socket.socket) -> None:
    proxy.to_target.piece_bytes = proxy.from_target.piece_bytes = 7
    assert answer(client) == DATA


@pytest.mark.parametrize("after", [0, 1, 5000])
def test_a_cut_comes_after_exactly_so_many_bytes(proxy: TCPProxy, client: socket.socket, after: int) -> None:
    proxy.to_target.cut_after = after
    found = answer(client)
    assert proxy.passed[Direction.TO_TARGET] == after
    assert DATA[:after].startswith(found)


@pytest.mark.parametrize("after", [0, 1, 5000])
def test_damage_is_one_bit_of_one_byte(proxy: TCPProxy, client: socket.socket, after: int) -> None:
    proxy.from_target.damaged_after = after
    found = answer(client)
    assert [at for at in range(len(DATA)) if found[at] != DATA[at]] == [after]


def test_what_is_held_back_comes_later(proxy: TCPProxy, client: socket.socket) -> None:
    proxy.hold()
    client.sendall(b"x")
    client.settimeout(0.2)
    with pytest.raises(TimeoutError):
        client.recv(1)
    proxy.hold(held=False)
    client.settimeout(20.0)
    assert client.recv(1) == b"x"


def test_what_is_swallowed_never_comes(proxy: TCPProxy, client: socket.socket) -> None:
    proxy.to_target.swallowed = True
    assert answer(client) == b""


def test_all_connections_can_be_cut_and_new_ones_are_let_in(proxy: TCPProxy, client: socket.socket) -> None:
    client.sendall(b"x")
    assert client.recv(1) == b"x"
    proxy.cut()
    with contextlib.suppress(ConnectionResetError):  # an end in order is as good
        assert client.recv(1) == b""
    with socket.create_connection(proxy.address, timeout=20.0) as again:
        assert answer(again) == DATA
