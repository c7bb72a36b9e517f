"""The kit's peer in a process of its own does what it is asked, and can be stopped and killed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.api import ErrorKind, KVFerryError
from kvferry.testing.conformance.channel_process import PeerProcess, soon

SUBJECT = "core.tests.testing.lonely_subject:make"
PATIENCE = 60.0


@pytest.fixture
def peer() -> Iterator[PeerProcess]:
    peer = PeerProcess(SUBJECT, PATIENCE)
    peer.open("instance", b"e" * 16, 1 << 20)
    yield peer
    peer.close()


def test_a_peer_answers_for_its_channel_and_its_memory(peer: PeerProcess) -> None:
    assert peer.exported.endswith(b"e" * 16)
    taken, blank = peer.memory.take(b"some bytes"), peer.memory.reserve(3)
    assert peer.memory.bytes_of(taken) == b"some bytes"
    assert peer.memory.bytes_of(blank) == b"\x5a" * 3
    own = peer.connect(peer.exported)
    assert peer.move("read", own, blank, taken.offset) == "DONE"
    assert peer.memory.bytes_of(blank) == b"som"
    assert peer.move("read", own, blank, 1 << 20) == "PROTOCOL"
    peer.memory.settle(taken)
    assert peer.memory.trespasses() == []
    assert peer.move("write", own, blank, taken.offset + 1) == "DONE"
    assert peer.memory.trespasses() == [f"{taken} was changed after its ticket had ended"]


def test_what_its_channel_raises_is_raised_here(peer: PeerProcess) -> None:
    with pytest.raises(KVFerryError, match="nobody is there") as caught:
        peer.connect(peer.exported[:-1] + b"x")
    assert caught.value.kind is ErrorKind.IO


def test_a_peer_can_be_stopped_and_goes_on(peer: PeerProcess) -> None:
    peer.stop()
    assert state(peer) == "T"
    peer.go_on()
    assert soon(lambda: state(peer) != "T", PATIENCE)
    assert peer.memory.trespasses() == []


def test_a_killed_peer_is_gone_when_that_returns(peer: PeerProcess) -> None:
    peer.kill()
    assert not Path(f"/proc/{peer.pid}").exists()


def state(peer: PeerProcess) -> str:
    return Path(f"/proc/{peer.pid}/stat").read_text().rpartition(")")[2].split()[0]
