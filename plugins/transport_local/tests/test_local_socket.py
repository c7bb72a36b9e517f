"""Strangers and broken peers on the control socket: each loses its own connection, and nobody else's."""

from __future__ import annotations

import array
import contextlib
import mmap
import os
import socket
import time
from collections.abc import Iterator

import numpy as np
import pytest
from attrs import define, field
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvferry_transport_local.frames import (
    MAXIMUM_ROWS,
    Announce,
    Codec,
    Frame,
    Hello,
    Listed,
    Refused,
    Sync,
    Synced,
    Welcome,
    WriteRequest,
    Written,
    pack_rows,
)
from kvferry_transport_local.generations import Generations
from kvferry_transport_local.probing import Probe
from plugins.transport_local.tests.local_bench import (
    LENGTH,
    SECONDS,
    End,
    Ends,
    errors,
    fill,
    submit,
    whole,
)

CODEC = Codec()


@define
class Stranger:
    """A bare socket to a channel, on which a test says what it likes."""

    end: socket.socket
    page: Generations
    probe: Probe = field(factory=Probe)

    @classmethod
    @contextlib.contextmanager
    def at(cls, channel: End) -> Iterator[Stranger]:
        export = CODEC.export(channel.channel.export())
        page = Generations()
        page.raise_word(0)
        page.raise_word(9)  # for the one region that it may announce
        with contextlib.closing(page), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as end:
            end.settimeout(SECONDS)
            end.connect(f"\0kvferry-{export.address.hex()}")
            yield cls(end, page)

    def send(self, data: bytes, *fds: int) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.end.sendmsg([data], rights)

    def say(self, frame: Frame, *fds: int) -> None:
        self.send(CODEC.encode(frame), *fds)

    def hear(self) -> Frame | None:
        """The next frame; ``None`` at the end."""
        try:
            data, fds, _, _ = socket.recv_fds(self.end, 1 << 16, 1)
        except ConnectionResetError:
            return None
        for fd in fds:
            os.close(fd)
        return CODEC.frame(data) if data else None

    def hear_until(self, kind: type) -> Frame:
        while (found := self.hear()) is not None:
            if isinstance(found, kind):
                return found
        raise AssertionError(f"it ended before {kind.__name__}")

    def is_thrown_out(self) -> bool:
        while self.hear() is not None:
            pass
        return True

    def hello(self, channel: End, **other: object) -> Hello:
        export = CODEC.export(channel.channel.export())
        said = {
            "version": 1,
            "epoch": bytes(16),
            "instance": "stranger",
            "rank": 0,
            "wanted": export.epoch,
            "probe": self.probe.token,
            "probe_address": self.probe.address,
        }
        return Hello(**said | other)  # type: ignore[arg-type]

    def introduce(self, channel: End) -> Announce:
        """Be a proper peer; what the channel announced."""
        self.say(self.hello(channel), self.page.fd)
        self.hear_until(Welcome)
        found = self.hear_until(Announce)
        assert isinstance(found, Announce)
        self.hear_until(Listed)
        return found


@pytest.fixture
def end(ends: Ends) -> End:
    return ends.open()


def goes_on(ends: Ends, end: End) -> None:
    """The channel serves others."""
    other = ends.open()
    fill(end, 8)
    assert errors(submit("read", other, other.connect(end), whole(1000))) == [None]
    assert np.array_equal(other.bytes[:1000], end.bytes[:1000])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.binary(min_size=1, max_size=200), min_size=1, max_size=3), st.booleans())
def test_garbage_ends_the_connection_it_came_on(end: End, packets: list[bytes], introduced: bool) -> None:
    with Stranger.at(end) as stranger:
        if introduced:
            stranger.introduce(end)
        for packet in packets:
            stranger.send(packet)
        assert stranger.is_thrown_out()


def test_a_channel_survives_garbage(ends: Ends, end: End) -> None:
    other = ends.open()
    connection = other.connect(end)
    for data in (b"\xff", bytes(1 << 17), CODEC.encode(Listed())[:-1], b""):
        with Stranger.at(end) as stranger:
            stranger.send(data)
            assert stranger.is_thrown_out()
    assert connection.alive
    assert errors(submit("read", other, connection, whole(1000))) == [None]
    goes_on(ends, end)


def test_frames_out_of_turn_end_the_connection(end: End) -> None:
    first: list[Frame] = [
        Listed(),
        Sync(1),
        Welcome(bytes(16), bytes(16), 0, 0.0),
        Refused("io", "no"),
        WriteRequest(1, time.monotonic() + 10, b""),
    ]
    for frame in first:
        with Stranger.at(end) as stranger:
            stranger.say(frame)
            assert stranger.is_thrown_out(), frame
    later: list[Frame] = [
        Written(1, [], []),
        Refused("io", "no"),
        Announce("x", "host", 1, 0, 0, 1, -1),
        Announce("x", "device", 1, 0, 5, 1, -1),
        WriteRequest(1, float("nan"), b""),
        WriteRequest(1, time.monotonic() + 10, bytes(55)),
    ]
    for frame in later:
        with Stranger.at(end) as stranger:
            stranger.introduce(end)
            stranger.say(frame)
            assert stranger.is_thrown_out(), frame
    with Stranger.at(end) as stranger:
        stranger.introduce(end)
        stranger.say(stranger.hello(end), stranger.page.fd)
        assert stranger.is_thrown_out()


def test_descriptors_that_nobody_asked_for_are_given_back(end: End) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with Stranger.at(end) as stranger:
        stranger.introduce(end)
        stranger.say(Sync(1), stranger.page.fd)
        assert stranger.is_thrown_out()
    with Stranger.at(end) as stranger:
        stranger.say(stranger.hello(end), *[stranger.page.fd] * 5)
        assert stranger.is_thrown_out()
    with open("/dev/zero", "rb") as nothing, Stranger.at(end) as stranger:
        stranger.say(stranger.hello(end), nothing.fileno())
        assert stranger.is_thrown_out()
    until = time.monotonic() + SECONDS
    while len(os.listdir("/proc/self/fd")) != before:
        assert time.monotonic() < until, "descriptors are left"
        time.sleep(0.01)


def test_a_hello_to_another_epoch_is_refused(end: End) -> None:
    with Stranger.at(end) as stranger:
        stranger.say(stranger.hello(end, wanted=bytes(16)), stranger.page.fd)
        refused = stranger.hear()
        assert isinstance(refused, Refused)
        assert refused.kind == "protocol"
        assert stranger.is_thrown_out()


def test_a_hello_of_another_version_is_refused_with_both_versions(end: End) -> None:
    with Stranger.at(end) as stranger:
        stranger.say(stranger.hello(end, version=7), stranger.page.fd)
        refused = stranger.hear()
        assert isinstance(refused, Refused)
        assert (refused.kind, refused.why) == ("compatibility", "wire version 7 against 1")


def test_a_caller_that_says_nothing_is_dropped(ends: Ends) -> None:
    end = ends.open(facts={"operation_seconds": 0.1})
    with Stranger.at(end) as stranger:
        assert stranger.is_thrown_out()
    goes_on(ends, end)


def test_many_silent_callers_do_not_shut_out_a_peer_for_good(ends: Ends) -> None:
    end = ends.open(facts={"operation_seconds": 0.3})
    with contextlib.ExitStack() as stack:
        for _ in range(80):
            stack.enter_context(Stranger.at(end))
        time.sleep(0.4)
        goes_on(ends, end)


BAD_ROWS = [
    ("beyond the end", lambda there: (there.slot, there.generation, LENGTH - 5, 9, 1, 0, 6)),
    ("far beyond", lambda there: (there.slot, there.generation, 2**64 - 8, 9, 1, 0, 16)),
    ("too long", lambda there: (there.slot, there.generation, 0, 9, 1, 0, LENGTH + 1)),
    ("source too short", lambda there: (there.slot, there.generation, 0, 9, 1, 4090, 7)),
    ("another slot", lambda there: (there.slot + 1, there.generation, 0, 9, 1, 0, 5)),
    ("another generation", lambda there: (there.slot, there.generation + 2, 0, 9, 1, 0, 5)),
    ("no such source", lambda there: (there.slot, there.generation, 0, 8, 1, 0, 5)),
    ("source taken back", lambda there: (there.slot, there.generation, 0, 9, 3, 0, 5)),
]


@pytest.mark.parametrize("row", [row for _, row in BAD_ROWS], ids=[name for name, _ in BAD_ROWS])
def test_the_owner_checks_what_a_peer_wants_to_write(end: End, row: object) -> None:
    fill(end, 9)
    before = end.bytes.copy()
    with Stranger.at(end) as stranger:
        there = stranger.introduce(end)
        source = np.full(4096, 0x5A, np.uint8)
        stranger.say(Announce("source", "host", 4096, source.ctypes.data, 9, 1, -1))
        stranger.say(WriteRequest(4, time.monotonic() + SECONDS, pack_rows([row(there)])))  # type: ignore[operator]
        answer = stranger.hear_until(Written)
        assert isinstance(answer, Written)
        assert [number for number, _ in answer.failed] == [0]
        assert answer.reasons[0][0] == "protocol"
    assert np.array_equal(end.bytes, before)


def test_a_peer_may_write_what_is_in_order(end: End) -> None:
    """And so the refusals here are no accident."""
    with Stranger.at(end) as stranger:
        there = stranger.introduce(end)
        source = np.full(4096, 0x5A, np.uint8)
        stranger.say(Announce("source", "host", 4096, source.ctypes.data, 9, 1, -1))
        row = (there.slot, there.generation, LENGTH - 6, 9, 1, 4090, 6)
        stranger.say(WriteRequest(4, time.monotonic() + SECONDS, pack_rows([row])))
        assert stranger.hear_until(Written) == Written(4, [], [])
    assert end.bytes[-7:].tolist() == [0, *[0x5A] * 6]


def test_a_request_that_is_too_old_is_not_carried_out(end: End) -> None:
    before = end.bytes.copy()
    with Stranger.at(end) as stranger:
        there = stranger.introduce(end)
        source = np.full(4096, 0x5A, np.uint8)
        stranger.say(Announce("source", "host", 4096, source.ctypes.data, 9, 1, -1))
        row = (there.slot, there.generation, 0, 9, 1, 0, 4096)
        stranger.say(WriteRequest(4, time.monotonic() - 0.001, pack_rows([row])))
        answer = stranger.hear_until(Written)
        assert isinstance(answer, Written)
        assert [kind for kind, _ in answer.reasons] == ["timeout"]
    assert np.array_equal(end.bytes, before)


def test_a_full_request_is_answered_row_by_row(end: End) -> None:
    with Stranger.at(end) as stranger:
        there = stranger.introduce(end)
        rows = [(there.slot, there.generation, LENGTH + number, 9, 1, 0, 1) for number in range(MAXIMUM_ROWS)]
        source = np.full(4096, 0x5A, np.uint8)
        stranger.say(Announce("source", "host", 4096, source.ctypes.data, 9, 1, -1))
        stranger.say(WriteRequest(4, time.monotonic() + SECONDS, pack_rows(rows)))
        answer = stranger.hear_until(Written)
        assert isinstance(answer, Written)
        assert [number for number, _ in answer.failed] == list(range(MAXIMUM_ROWS))


def test_news_come_before_the_answer_to_who_asked(end: End) -> None:
    with Stranger.at(end) as stranger:
        there = stranger.introduce(end)
        end.channel.deregister(there.name)
        stranger.say(Sync(12))
        assert type(stranger.hear()).__name__ == "Withdraw"
        assert stranger.hear() == Synced(12)


def test_peers_cannot_change_the_page_of_generations(end: End) -> None:
    with Stranger.at(end) as stranger:
        stranger.say(stranger.hello(end), stranger.page.fd)
        _, fds, _, _ = socket.recv_fds(stranger.end, 1 << 16, 1)
        (fd,) = fds
        try:
            with pytest.raises(PermissionError):
                mmap.mmap(fd, 4096, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
            with pytest.raises(PermissionError):
                os.pwrite(fd, bytes(8), 0)
        finally:
            os.close(fd)
