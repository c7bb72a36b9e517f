"""A socket that instances take for a directory, and that says nothing, or what the test wants."""

from __future__ import annotations

from typing import Self

import zmq

from kvferry_sharing_p2p.network.endpoint import Endpoint, parse_url
from plugins.sharing_p2p.tests.controller_sides import PATIENCE


class MuteDirectory:
    """A context manager. Threads: one."""

    def __enter__(self) -> Self:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVHWM, 1)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.bind("tcp://127.0.0.1:0")
        self.endpoint: Endpoint = parse_url(self._socket.getsockopt_string(zmq.LAST_ENDPOINT))
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()
        self._context.term()

    def hear(self) -> None:
        """Take what comes, until nothing does for a moment."""
        while self._socket.poll(50):
            self._socket.recv_multipart()

    def say(self, frames: list[bytes]) -> None:
        """To whoever has said something last; waits for it."""
        assert self._socket.poll(int(PATIENCE * 1000)), "nobody says anything"
        peer = self._socket.recv_multipart()[0]
        self._socket.send_multipart([peer, *frames])
