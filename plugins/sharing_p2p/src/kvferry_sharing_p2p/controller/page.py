"""The controller's page: how things stand as JSON over HTTP, for people, probes and monitoring."""

from __future__ import annotations

import io
import json
import logging
import select
import socket
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.client import LineTooLong
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from kvferry.api import ErrorKind, KVFerryError, Retry
from kvferry_sharing_p2p.network.endpoint import Endpoint
from kvferry_sharing_p2p.network.sockets import Bell

logger = logging.getLogger(__name__)

REQUEST_SECONDS = 5.0
"""A client that says nothing for so long is dropped."""
MOST_REQUESTS = 16
"""At the same time."""
MAXIMUM_REQUEST_BYTES = 16384
"""Of the head of a request. A body is not read."""


class StatusPage:
    """Serves ``/status``, which is what ``read_status`` gives, and ``/health`` at ``listen``.

    ``read_status`` may wait, is called from several threads, and gives None when the directory does not
    answer. Requests wait for each other no more than that: each has a thread of its own.
    """

    def __init__(self, listen: Endpoint, read_status: Callable[[], dict[str, Any] | None]) -> None:
        self._listen = listen
        self._read_status = read_status
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None
        self._bell: Bell | None = None
        self._closing = False

    def open(self) -> Endpoint:
        """Listen and start; where, which tells the port if any was good. Raises
        :class:`kvferry.api.KVFerryError` of kind ``IO`` when the address cannot be had."""
        try:
            wanted = self._listen.resolved()
            kind = _Server6 if wanted.is_version_6 else _Server
            self._server = kind((wanted.host, wanted.port), self._read_status)
        except OSError as error:
            raise KVFerryError(
                f"the page of status cannot listen at {self._listen}",
                kind=ErrorKind.IO,
                where="--http",
                why=error.strerror or str(error),
                remedy="choose another address with --http, or --http off",
                retry=Retry.AFTER_CHANGE,
            ) from error
        self._bell = Bell()
        self._thread = threading.Thread(
            target=self._run, args=(self._server, self._bell), name="kvferry-status-page", daemon=True
        )
        self._thread.start()
        return Endpoint(self._listen.host, int(self._server.server_address[1]))

    def close(self) -> None:
        """Stop, and end the requests under way. Idempotent."""
        if self._thread is None or self._bell is None or self._server is None:
            return
        self._closing = True
        self._bell.ring()
        self._thread.join()
        self._thread = None
        self._server.hang_up()
        self._server.server_close()
        self._bell.close()

    def _run(self, server: _Server, bell: Bell) -> None:
        poller = select.poll()
        poller.register(server.fileno(), select.POLLIN)
        poller.register(bell.descriptor, select.POLLIN)
        while True:
            poller.poll()
            if self._closing:
                return
            try:
                server.handle_request()
            except Exception:
                logger.exception("kvferry: a request to the page of status failed")


class _Server(ThreadingHTTPServer):
    # Threads are waited for when it closes, and their connections are cut before.
    daemon_threads = False
    block_on_close = True
    timeout = 0.0
    request_queue_size = MOST_REQUESTS

    def __init__(self, address: tuple[str, int], read_status: Callable[[], dict[str, Any] | None]) -> None:
        self.read_status = read_status
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._room = threading.BoundedSemaphore(MOST_REQUESTS)
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        # The one above asks for this machine's name, which can take seconds and is shown nowhere.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        with self._lock:
            self._open.add(request)
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._over(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._over(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        # A client that went away, as a rule; nothing is wrong here.
        logger.debug("kvferry: a request to the page of status was cut")

    def hang_up(self) -> None:
        """Cut all connections that there are."""
        with self._lock:
            for request in self._open:
                try:
                    request.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue

    def _over(self, request: Any) -> None:
        with self._lock:
            self._open.discard(request)
        self._room.release()


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Head(io.BufferedReader):
    """Reads the head of one request and no more than it may have."""

    _left = MAXIMUM_REQUEST_BYTES

    def readline(self, size: int | None = -1, /) -> bytes:
        line = super().readline(self._left + 1)
        self._left -= len(line)
        if self._left < 0:
            raise LineTooLong("head of the request")
        return line


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = REQUEST_SECONDS
    rbufsize = 0

    def setup(self) -> None:
        super().setup()
        self.rfile = _Head(self.rfile)

    def parse_request(self) -> bool:
        if not super().parse_request():
            return False
        if self.command != "GET":
            self._tell(HTTPStatus.METHOD_NOT_ALLOWED, "text/plain", b"only GET is understood\n", allow="GET")
            return False
        return True

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path not in ("/health", "/status"):
            self._tell(HTTPStatus.NOT_FOUND, "text/plain", b"there are /status and /health\n")
            return
        status = self.server.read_status()
        if status is None:
            self._tell(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", b"the directory does not answer\n")
        elif path == "/health":
            self._tell(HTTPStatus.OK, "text/plain", b"ok\n")
        else:
            text = json.dumps(status, indent=2, ensure_ascii=False) + "\n"
            self._tell(HTTPStatus.OK, "application/json", text.encode())

    def version_string(self) -> str:
        return "kvferry"

    def log_message(self, format: str, *arguments: Any) -> None:
        logger.debug("kvferry: page of status: %s", format % arguments)

    def _tell(self, code: HTTPStatus, kind: str, body: bytes, *, allow: str = "") -> None:
        self.send_response(code)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        if allow:
            self.send_header("Allow", allow)
        self.end_headers()
        self.close_connection = True
        if self.command != "HEAD":
            self.wfile.write(body)
