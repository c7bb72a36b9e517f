"""A memory file in two processes: the same bytes, and no trust in what could still change."""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvferry.api import ErrorKind, KVFerryError
from kvferry.data.arena import FirstTouch, MemoryFileArena
from kvferry.data.handover import recv_fd, send_fd
from kvferry.data.mapping import create_region, map_region, region_view

MIB = 1 << 20
DEADLINE = 60.0

CHILD = """
    import socket, sys
    from kvferry.data.handover import recv_fd
    from kvferry.data.mapping import map_region, region_view

    connection = socket.socket(fileno=int(sys.argv[1]))
    message, fd = recv_fd(connection)
    name, length = message.decode().split()
    with map_region(fd, int(length), name) as mapped:
        view = region_view(mapped.region)
        seen = view[:4].tolist()
        view[-4:] = (9, 8, 7, 6)
    connection.sendall(repr((mapped.region.name, seen)).encode())
"""


@pytest.fixture(autouse=True)
def _no_descriptor_or_mapping_left() -> Iterator[None]:
    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("memfd:")

    before = held()
    yield
    assert held() == before


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair()
    left.settimeout(DEADLINE)
    right.settimeout(DEADLINE)
    with left, right:
        yield left, right


def test_another_process_sees_and_writes_the_same_bytes(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    arena = MemoryFileArena("cpu", 3 * MIB + 11)
    region = arena.open()
    assert arena.wait(DEADLINE) is FirstTouch.DONE
    view = region_view(region)
    view[:4] = (1, 2, 3, 4)
    command = [sys.executable, "-c", textwrap.dedent(CHILD), str(theirs.fileno())]
    with subprocess.Popen(command, pass_fds=[theirs.fileno()]) as child:
        send_fd(ours, region.fd, f"cpu {region.length}".encode())
        assert ours.recv(100) == repr(("cpu", [1, 2, 3, 4])).encode()
        assert child.wait(DEADLINE) == 0
    assert view[-4:].tolist() == [9, 8, 7, 6]
    arena.close()


def test_messages_of_any_length_keep_their_descriptors(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    with create_region("first", MIB) as first, create_region("second", MIB) as second:
        send_fd(ours, first.region.fd, b"")
        send_fd(ours, second.region.fd, b"x" * 40_000)
        for mapped, message in ((first, b""), (second, b"x" * 40_000)):
            received, fd = recv_fd(theirs)
            assert received == message
            assert os.fstat(fd).st_ino == os.fstat(mapped.region.fd).st_ino
            assert not os.get_inheritable(fd)
            os.close(fd)


@pytest.mark.parametrize("fds", [0, 2])
def test_anything_but_one_descriptor_is_refused(pair: tuple[socket.socket, socket.socket], fds: int) -> None:
    ours, theirs = pair
    with create_region("one", MIB) as mapped:
        socket.send_fds(ours, [b"\x02\x00\x00\x00hi"], [mapped.region.fd] * fds)
        with pytest.raises(KVFerryError) as caught:
            recv_fd(theirs)
    assert caught.value.kind is ErrorKind.PROTOCOL
    assert f"{fds} descriptors" in caught.value.why


def test_a_message_that_ends_early_or_is_too_long_is_refused(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair
    with create_region("one", MIB) as mapped:
        send_fd(ours, mapped.region.fd, b"12345")
        with pytest.raises(KVFerryError, match="no descriptor") as caught:
            recv_fd(theirs, limit=4)
        assert "more than 4" in caught.value.why
        assert theirs.recv(5) == b"12345"
        socket.send_fds(ours, [b"\x09\x00\x00\x00short"], [mapped.region.fd])
        ours.close()
        with pytest.raises(KVFerryError) as caught:
            recv_fd(theirs)
        assert "in the middle" in caught.value.why


def test_the_size_of_a_created_file_is_final() -> None:
    with create_region("sealed", MIB) as mapped:
        for size in (0, MIB // 2, 2 * MIB):
            with pytest.raises(PermissionError):
                os.ftruncate(mapped.region.fd, size)
        with pytest.raises(PermissionError):
            fcntl.fcntl(mapped.region.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def unsealed() -> int:
    fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, MIB)
    return fd


def ordinary() -> int:
    fd = os.open("/proc/self/exe", os.O_RDONLY)
    assert os.fstat(fd).st_size > 100
    return fd


@pytest.mark.parametrize(
    ("make", "length", "why"),
    [
        (unsealed, MIB, "not sealed"),
        (unsealed, MIB + 1, f"has {MIB} bytes, and {MIB + 1} were announced"),
        (ordinary, 100, "no memory file"),
        (unsealed, 0, "0 bytes was announced"),
    ],
)
def test_files_that_could_change_under_us_are_not_mapped(
    make: Callable[[], int], length: int, why: str
) -> None:
    fd = make()
    with pytest.raises(KVFerryError) as caught:
        map_region(fd, length, "theirs")
    assert caught.value.kind is ErrorKind.PROTOCOL
    assert why in caught.value.why
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_names_of_any_length_and_script_are_accepted() -> None:
    for name in ("", "ü" * 300, "a/b c"):
        with create_region(name, 1) as mapped:
            assert mapped.region.name == name
