"""Peers that are real processes: stopped, killed, without rights, of another user."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from kvferry.api import ErrorKind, KVFerryError
from plugins.transport_local.tests.local_bench import LENGTH, SECONDS, Ends, errors, only_error, submit, whole

NOBODY = 65534


class Process:
    """The tests' end of :mod:`plugins.transport_local.tests.local_peer`."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "plugins.transport_local.tests.local_peer"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )

    def ask(self, call: str, *arguments: Any) -> Any:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps({"call": call, "arguments": arguments}).encode() + b"\n")
        stdin.flush()
        ready, _, _ = select.select([stdout], [], [], SECONDS)
        assert ready, f"the peer did not answer {call}"
        told = json.loads(stdout.readline())
        if "kind" in told:
            raise KVFerryError(told["text"], kind=ErrorKind[told["kind"]])
        assert "answer" in told, told
        return told["answer"]

    def open(self, memory_file: bool = True, byte: int = 7) -> bytes:
        return bytes.fromhex(self.ask("open", memory_file, byte))

    def stop(self) -> None:
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def end(self) -> None:
        self.kill()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()


@pytest.fixture
def start() -> Iterator[Callable[[], Process]]:
    made: list[Process] = []

    def one() -> Process:
        made.append(Process())
        return made[-1]

    yield one
    for process in made:
        process.end()


@pytest.mark.parametrize("memory_file", [True, False], ids=["mapped", "cross-process"])
def test_a_stopped_peer_is_read_and_never_written_late(
    ends: Ends, start: Callable[[], Process], memory_file: bool
) -> None:
    near, peer = ends.open(), start()
    connection = near.channel.connect(peer.open(memory_file), time.monotonic() + SECONDS)
    near.bytes[:] = 1
    peer.stop()
    write = submit("write", near, connection, whole(), time.monotonic() + 0.2)
    read = submit("read", near, connection, whole(4096))
    assert errors(read) == [None]
    assert set(near.bytes[:4096].tolist()) == {7}
    assert only_error(write).kind is ErrorKind.TIMEOUT
    near.bytes[:] = 2
    peer.go_on()
    # It answers in order, so it has seen the write that is over.
    assert errors(submit("write", near, connection, whole(0))) == [None]
    assert peer.ask("values") == [7]


@pytest.mark.parametrize("memory_file", [True, False], ids=["mapped", "cross-process"])
def test_a_killed_peer_is_gone_although_its_child_holds_the_connection(
    ends: Ends, start: Callable[[], Process], memory_file: bool
) -> None:
    near, peer = ends.open(), start()
    connection = near.channel.connect(peer.open(memory_file), time.monotonic() + SECONDS)
    assert errors(submit("read", near, connection, whole(100))) == [None]
    child = peer.ask("leave_a_child")
    try:
        peer.kill()
        assert only_error(submit("read", near, connection, whole(100))).kind is ErrorKind.IO
        assert not connection.alive
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("dumpable", [1, 0], ids=["readable", "refused"])
def test_a_process_that_may_not_be_read_is_told_apart(start: Callable[[], Process], dumpable: int) -> None:
    """Only what has no memory file depends on it."""
    owner, plain, reader = start(), start(), start()
    for process in (owner, plain, reader):
        process.ask("give_up_rights")
        process.ask("set_dumpable", 1)
    reader.open(True, 9)
    owner.ask("set_dumpable", dumpable)
    plain.ask("set_dumpable", dumpable)
    without, mapped = owner.open(False), plain.open(True)
    told = reader.ask("move", "read", reader.ask("connect", without.hex()), 4096)
    if dumpable:
        assert told == ["DONE"]
    else:
        assert told[0] == "UNSUPPORTED"
        assert "EPERM" in told[1]
        assert "tcp" in told[1]
    assert reader.ask("move", "read", reader.ask("connect", mapped.hex()), 4096) == ["DONE"]
    assert sorted(reader.ask("values")) == [7, 9]
    assert reader.ask("move", "write", 0, LENGTH) == ["DONE"]
    assert owner.ask("values") == reader.ask("values")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_not_let_in(ends: Ends, start: Callable[[], Process]) -> None:
    near, peer = ends.open(), start()
    peer.ask("become", NOBODY)
    export = peer.open()
    with pytest.raises(KVFerryError) as caught:
        near.channel.connect(export, time.monotonic() + SECONDS)
    assert caught.value.kind is ErrorKind.COMPATIBILITY
    assert str(NOBODY) in caught.value.why
    with pytest.raises(KVFerryError) as caught:
        peer.ask("connect", near.channel.export().hex())
    assert caught.value.kind is ErrorKind.COMPATIBILITY


def test_a_peer_of_another_boot_is_on_another_host(ends: Ends) -> None:
    near, far = ends.open(), ends.open()
    fields = msgspec.msgpack.decode(far.channel.export())
    fields[-1] = "another boot"
    with pytest.raises(KVFerryError, match="another host") as caught:
        near.channel.connect(msgspec.msgpack.encode(fields), time.monotonic() + SECONDS)
    assert caught.value.kind is ErrorKind.IO
