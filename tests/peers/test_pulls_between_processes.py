"""Chunks of a peer in another process come into our first tier, over each channel that is there."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from attrs import frozen

from kvferry.data.plans import Direction
from kvferry.data.wire import MeetPeer, OrderDone, PullChunks
from tests.peers.peer_worker import BLOCK, BLOCKS, CHUNK, LONG, PeerWorker, bytes_of, open_peer_worker

PEER = "far-away"


@frozen
class Far:
    """A peer in a process of its own."""

    process: subprocess.Popen[bytes]
    seed: int
    epoch: bytes
    export: bytes

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def end(process: subprocess.Popen[bytes]) -> None:
    """Let it end in order, unless it was killed."""
    killed = process.returncode is not None
    try:
        process.communicate(timeout=LONG)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
    assert killed or process.returncode == 0


@pytest.fixture(params=["tcp", "local"])
def channel(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def near(channel: str) -> Iterator[PeerWorker]:
    with (
        tempfile.TemporaryDirectory(prefix="kf") as folder,
        open_peer_worker(channel, "near", Path(folder)) as opened,
    ):
        opened.open_channel()
        yield opened


@pytest.fixture
def start_far(channel: str) -> Iterator[Callable[[int], Far]]:
    with ExitStack() as stack:

        def start(seed: int) -> Far:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.peers.peer_worker", channel, PEER, str(seed)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
            stack.callback(end, process)
            assert process.stdout is not None
            assert select.select([process.stdout], [], [], LONG)[0], "the peer does not start"
            told = json.loads(process.stdout.readline())
            return Far(process, seed, bytes.fromhex(told["epoch"]), bytes.fromhex(told["export"]))

        yield start


def pull(near: PeerWorker, number: int, far: Far, seconds: float = LONG) -> OrderDone:
    """A whole chunk and a tail into slots with a hole between them."""
    chunks = PullChunks(
        number, PEER, far.epoch, (b"a", b"b"), (CHUNK, 2 * BLOCK), (6, 1), (0, 3), time.monotonic() + seconds
    )
    near.post(chunks)
    done = near.hear(OrderDone, number)
    assert done.id == number
    return done


def check(near: PeerWorker, number: int, far: Far) -> None:
    """Pull, load what came into the engine, and compare: blocks of the peer's slots 6 and 1."""
    near.post(MeetPeer(PEER, far.epoch, far.export))
    assert pull(near, number, far).faults == {}
    near.pages[:] = 0
    near.copy(Direction.LOAD, 0, [8, 9, 10, 11])
    near.copy(Direction.LOAD, 3, [2, 3])
    theirs = bytes_of(far.seed, near.pages.size).reshape(BLOCKS, -1)
    expected = np.zeros_like(near.pages)
    expected[8:12], expected[2:4] = theirs[24:28], theirs[4:6]
    assert np.array_equal(near.pages, expected)


def test_chunks_come_from_a_peer_and_after_its_death_from_its_successor(
    near: PeerWorker, start_far: Callable[[int], Far]
) -> None:
    far = start_far(1)
    check(near, 1, far)
    far.kill()
    failed = pull(near, 2, far)
    assert failed.faults == {0: "failed", 1: "failed"}
    assert failed.reason
    successor = start_far(2)
    check(near, 3, successor)
    assert pull(near, 4, far).faults == {0: "gone", 1: "gone"}


def test_a_stopped_peer_is_waited_for_until_the_deadline_where_it_has_to_answer(
    channel: str, near: PeerWorker, start_far: Callable[[int], Far]
) -> None:
    far = start_far(3)
    check(near, 1, far)
    far.process.send_signal(signal.SIGSTOP)
    try:
        os.waitid(os.P_PID, far.process.pid, os.WSTOPPED | os.WNOWAIT)
        stopped = pull(near, 2, far, 0.3)
    finally:
        far.process.send_signal(signal.SIGCONT)
    # Memory of a process on the same host is read without it.
    assert stopped.faults == ({} if channel == "local" else {0: "timeout", 1: "timeout"})
    check(near, 3, far)
