"""What strangers send to the controller's sockets: it is answered with a reason, or dropped, and nothing else
happens."""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import os
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvferry.api import KVFerryError
from kvferry_sharing_p2p.controller import page as page_module
from kvferry_sharing_p2p.controller.page import MAXIMUM_REQUEST_BYTES, MOST_REQUESTS, StatusPage
from kvferry_sharing_p2p.controller.server import ControllerServer
from kvferry_sharing_p2p.directory.answers import DirectoryOptions
from kvferry_sharing_p2p.directory.desk import Desk
from kvferry_sharing_p2p.directory.messages import (
    MAXIMUM_FRAME_BYTES,
    WIRE_VERSION,
    Accepted,
    AskStatus,
    Codec,
    FromDirectory,
    Hello,
    Rejected,
    Status,
)
from kvferry_sharing_p2p.directory.state import Directory
from kvferry_sharing_p2p.network.asking import ask_status
from kvferry_sharing_p2p.network.endpoint import Endpoint
from kvferry_sharing_p2p.network.secret import SharedSecret
from plugins.sharing_p2p.tests.controller_sides import (
    ANY_PORT,
    PATIENCE,
    SECRET,
    SPACE,
    Instance,
    prompt,
    serving,
    until,
)

CODEC = Codec()
QUESTION = CODEC.encode(AskStatus(version=WIRE_VERSION))


@contextlib.contextmanager
def dealer(endpoint: Endpoint) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.setsockopt(zmq.LINGER, 0)
        peer.connect(endpoint.url)
        yield peer


def answer(peer: zmq.Socket[bytes]) -> FromDirectory:
    assert peer.poll(int(PATIENCE * 1000)), "there is no answer"
    return CODEC.read_from_directory(peer.recv(), "the controller")


def status(endpoint: Endpoint, secret: SharedSecret | None = None) -> Status:
    return ask_status(endpoint, secret, PATIENCE, random=os.urandom)


@pytest.fixture(scope="module")
def controller() -> Iterator[Endpoint]:
    with serving() as endpoint:
        yield endpoint


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(frame=st.binary(max_size=200) | st.just(QUESTION).map(lambda good: good[:-1]))
def test_a_frame_that_is_no_message_is_answered_with_the_reason(controller: Endpoint, frame: bytes) -> None:
    with dealer(controller) as peer:
        peer.send(frame)
        rejected = answer(peer)
        assert isinstance(rejected, Rejected)
        assert rejected.version == WIRE_VERSION
        # The same peer is listened to afterwards.
        peer.send(QUESTION)
        assert isinstance(answer(peer), Status)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(frames=st.lists(st.sampled_from([b"", QUESTION, b"x" * 1000]), min_size=2, max_size=6))
def test_messages_of_several_frames_are_dropped_as_a_whole(controller: Endpoint, frames: list[bytes]) -> None:
    before = status(controller).rejected
    with dealer(controller) as peer:
        peer.send_multipart(frames)
        peer.send(QUESTION)
        after = answer(peer)
        assert isinstance(after, Status)
        assert after.rejected == before + 1
        assert not peer.poll(0)


def test_a_frame_that_is_too_long_ends_its_connection_and_no_other(controller: Endpoint) -> None:
    with Instance("a", controller) as a, dealer(controller) as peer:
        a.settle()
        peer.send(b"x" * (MAXIMUM_FRAME_BYTES + 1))
        assert not peer.poll(200)
        assert a.holders(prompt(1)) == {}
        assert a.is_current()
    until(lambda: status(controller).status.instances == (), "it has left in order")


@pytest.mark.parametrize("protected", [False, True])
def test_bytes_that_are_not_zeromq_are_dropped(protected: bool) -> None:
    secret = SECRET if protected else None
    greeting = b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\0NULL".ljust(64, b"\0")
    garbage = (b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), greeting, greeting[:30], b"\xff" * 64)
    with serving(secret) as endpoint, contextlib.ExitStack() as stack:
        for begin in garbage:
            peer = stack.enter_context(socket.create_connection((endpoint.host, endpoint.port), PATIENCE))
            with contextlib.suppress(OSError):
                peer.sendall(begin)
                # A frame that is announced and never comes, with more bytes than anybody has.
                peer.sendall(b"\x02" + b"\x7f" * 8)
        with Instance("a", endpoint, secret) as a:
            a.store(prompt(1))
            a.settle()
            assert status(endpoint, secret).status.keys == 8


def test_who_is_not_heard_leaves_also_when_nobody_asks() -> None:
    options = DirectoryOptions(heartbeat_seconds=0.05, limit_seconds=0.2)
    directory = Directory(options, os.urandom(16), 0.0)
    server = ControllerServer(Desk(directory), ANY_PORT, None, clock=time.monotonic, on_failed=lambda: None)
    endpoint = server.open()
    try:
        with dealer(endpoint) as peer:
            peer.send(
                CODEC.encode(
                    Hello(
                        version=WIRE_VERSION,
                        attempt=1,
                        instance="a",
                        epoch=b"e" * 16,
                        namespace=SPACE,
                        ranks=1,
                        address=b"",
                    )
                )
            )
            assert isinstance(answer(peer), Accepted)
            until(lambda: directory.next_due() == math.inf, "nobody is left who could be overdue")
    finally:
        server.close()


def test_a_server_that_has_ended_answers_no_question_and_frees_its_address() -> None:
    with serving() as endpoint:
        assert status(endpoint).status.instances == ()
    with pytest.raises(KVFerryError, match="does not answer"):
        ask_status(endpoint, None, 0.1, random=os.urandom)
    with serving(listen=endpoint) as again:
        assert again == endpoint


# -- the page --------------------------------------------------------------------------------------


@contextlib.contextmanager
def page(read_status: Any = lambda: {"schema": 1}) -> Iterator[Endpoint]:
    shown = StatusPage(Endpoint("127.0.0.1", 0), read_status)
    endpoint = shown.open()
    try:
        yield endpoint
    finally:
        shown.close()


def request(endpoint: Endpoint, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes, str]:
    connection = http.client.HTTPConnection(endpoint.host, endpoint.port, timeout=PATIENCE)
    try:
        connection.request(method, path, body)
        got = connection.getresponse()
        return got.status, got.read(), got.headers["Allow"] or ""
    finally:
        connection.close()


def test_the_page_knows_two_paths_and_one_method() -> None:
    with page() as at:
        assert json.loads(request(at, "GET", "/status")[1]) == {"schema": 1}
        assert request(at, "GET", "/status?x=1")[0] == 200
        assert request(at, "GET", "/health")[:2] == (200, b"ok\n")
        for path in ("/", "/status/", "/../etc/passwd", "/statusx"):
            assert request(at, "GET", path)[0] == 404
        for method in ("POST", "PUT", "DELETE", "HEAD", "OPTIONS", "BREW"):
            code, _, allow = request(at, method, "/status", b"a body" if method == "POST" else None)
            assert (code, allow) == (405, "GET")


def test_the_page_says_so_when_the_directory_does_not_answer() -> None:
    with page(lambda: None) as at:
        assert request(at, "GET", "/status")[0] == 503
        assert request(at, "GET", "/health")[0] == 503


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /" + b"x" * 2 * MAXIMUM_REQUEST_BYTES + b" HTTP/1.0\r\n\r\n",
        b"GET /status HTTP/1.0\r\nA: " + b"x" * 2 * MAXIMUM_REQUEST_BYTES + b"\r\n\r\n",
        b"GET /status HTTP/1.0\r\n" + b"A: b\r\n" * MAXIMUM_REQUEST_BYTES + b"\r\n",
        b"\0\0\r\n\r\n",
    ],
    ids=["long line", "long field", "many fields", "garbage"],
)
def test_the_page_refuses_what_is_too_long_or_no_request(sent: bytes) -> None:
    asked: list[bool] = []
    with page(lambda: asked.append(True)) as at:
        with socket.create_connection((at.host, at.port), PATIENCE) as peer:
            got = b""
            with contextlib.suppress(OSError):
                peer.sendall(sent)
                while piece := peer.recv(4096):
                    got += piece
        assert b" 200 " not in got.split(b"\n")[0]
        assert asked == []
        assert request(at, "GET", "/nothing")[0] == 404


def test_clients_that_say_nothing_take_no_more_than_their_share_and_keep_nobody_from_ending(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(page_module._Handler, "timeout", 10 * PATIENCE)
    with contextlib.ExitStack() as stack, page() as at:
        peers = [
            stack.enter_context(socket.create_connection((at.host, at.port), PATIENCE))
            for _ in range(MOST_REQUESTS)
        ]
        peers[0].sendall(b"GET /sta")

        def turned_away() -> bool:
            try:
                request(at, "GET", "/health")
            except (OSError, http.client.HTTPException):
                return True
            return False

        until(turned_away, "there is no room")
        peers.pop().close()

        def let_in() -> bool:
            return not turned_away()

        until(let_in, "there is room again")
        began = time.monotonic()
    assert time.monotonic() - began < PATIENCE
