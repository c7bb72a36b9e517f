"""A directory behind a ZeroMQ socket, on a thread of its own."""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvferry.api import ErrorKind, KVFerryError, Retry
from kvferry_sharing_p2p.directory.desk import Desk
from kvferry_sharing_p2p.directory.messages import MAXIMUM_FRAME_BYTES, Status
from kvferry_sharing_p2p.network.endpoint import Endpoint, parse_url
from kvferry_sharing_p2p.network.secret import SharedSecret
from kvferry_sharing_p2p.network.sockets import Bell, configure, receive

if TYPE_CHECKING:
    import zmq

logger = logging.getLogger(__name__)

_DRAINED_AT_ONCE = 256
_LONGEST_WAIT_SECONDS = 3600.0


class ControllerServer:
    """Answers what comes to ``listen`` out of the directory behind ``desk``, which belongs to its thread from
    :meth:`open` on.

    ``clock`` gives the seconds that the directory counts in. ``on_failed`` is called, from that thread, if it
    ends before :meth:`close`.
    """

    def __init__(
        self,
        desk: Desk,
        listen: Endpoint,
        secret: SharedSecret | None,
        *,
        clock: Callable[[], float],
        on_failed: Callable[[], None],
    ) -> None:
        self._desk = desk
        self._listen = listen
        self._secret = secret
        self._clock = clock
        self._on_failed = on_failed
        self._lock = threading.Lock()
        self._asked: deque[queue.SimpleQueue[Status | None]] | None = None
        """Who waits for a status; None while nobody answers."""
        self._closing = False
        self._bell: Bell | None = None
        self._thread: threading.Thread | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None

    def open(self) -> Endpoint:
        """Listen and start; where, which tells the port if any was good. Raises
        :class:`kvferry.api.KVFerryError`: ``IO`` when the address cannot be had, ``CONFIG`` when others than
        this machine could reach it and there is no secret. Nothing is left open then."""
        import zmq

        wanted = self._resolved()
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = context.socket(zmq.ROUTER)
        try:
            configure(socket, MAXIMUM_FRAME_BYTES)
            socket.setsockopt(zmq.IPV6, int(wanted.is_version_6))
            if self._secret is not None:
                self._secret.protect_server(socket)
            socket.bind(wanted.url)
            bound = parse_url(socket.getsockopt_string(zmq.LAST_ENDPOINT))
        except BaseException as error:
            socket.close()
            context.term()
            if isinstance(error, zmq.ZMQError):
                raise self._cannot_listen(error) from error
            raise
        self._context = context
        self._bell = Bell()
        self._asked = deque()
        self._thread = threading.Thread(
            target=self._run, args=(socket, self._bell), name="kvferry-controller", daemon=True
        )
        self._thread.start()
        return Endpoint(self._listen.host, bound.port)

    def status(self, seconds: float) -> Status | None:
        """How things stand, from the thread that knows; None if it does not say so in time, or has ended.
        Any thread."""
        answer: queue.SimpleQueue[Status | None] = queue.SimpleQueue()
        with self._lock:
            if self._asked is None or self._bell is None:
                return None
            self._asked.append(answer)
            self._bell.ring()
        try:
            return answer.get(timeout=seconds)
        except queue.Empty:
            return None

    def close(self) -> None:
        """Stop and give the address back. Idempotent."""
        if self._thread is None or self._bell is None or self._context is None:
            return
        self._closing = True
        self._bell.ring()
        self._thread.join()
        self._thread = None
        self._bell.close()
        self._context.term()

    def _resolved(self) -> Endpoint:
        try:
            wanted = self._listen.resolved()
        except OSError as error:
            raise self._cannot_listen(error) from error
        if self._secret is None and not wanted.is_loopback():
            raise KVFerryError(
                f"a listener at {self._listen} needs a shared secret",
                kind=ErrorKind.CONFIG,
                where="--listen",
                why="others than this machine can reach it, and could publish and remove what they like",
                remedy="name one with --secret-file or --secret-variable, or listen at 127.0.0.1",
                retry=Retry.AFTER_CHANGE,
            )
        return wanted

    def _cannot_listen(self, error: Exception) -> KVFerryError:
        return KVFerryError(
            f"the controller cannot listen at {self._listen.url}",
            kind=ErrorKind.IO,
            where="--listen",
            why=str(error),
            remedy="choose an address of this machine, and a port that is free and that this user may use",
            retry=Retry.AFTER_CHANGE,
        )

    def _run(self, socket: zmq.Socket[bytes], bell: Bell) -> None:
        try:
            with socket:  # whatever happens: a socket left open would block close() for ever
                self._serve(socket, bell)
        except Exception:
            logger.exception("kvferry: the controller's thread has failed")
        finally:
            with self._lock:
                asked, self._asked = self._asked, None
            for answer in asked or ():
                answer.put(None)
            if not self._closing:
                self._on_failed()

    def _serve(self, socket: zmq.Socket[bytes], bell: Bell) -> None:
        import zmq

        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(bell.descriptor, zmq.POLLIN)
        while not self._closing:
            ready = dict(poller.poll(self._wait_milliseconds()))
            if bell.descriptor in ready:
                bell.hush()
            if socket in ready:
                self._drain(socket)
            self._tell_status()
            if self._clock() > self._desk.directory.next_due():
                # Whoever is overdue leaves now, and its memory with it, also when nobody asks.
                self._desk.directory.status(self._clock())

    def _wait_milliseconds(self) -> int:
        seconds = self._desk.directory.next_due() - self._clock()
        return math.ceil(1000 * min(max(seconds, 0.0), _LONGEST_WAIT_SECONDS)) + 1

    def _drain(self, socket: zmq.Socket[bytes]) -> None:
        import zmq

        # Bounded, so that a flood of messages does not keep operators waiting.
        for _ in range(_DRAINED_AT_ONCE):
            frames = receive(socket, 2)
            if frames is None:
                return
            if not frames:
                self._desk.rejected += 1
                continue
            peer, frame = frames
            try:
                answer = self._desk.answer(frame, self._clock(), "a peer")
            except Exception:
                # One message must not silence the directory for all others.
                logger.exception("kvferry: a message could not be handled")
                continue
            if answer is not None:
                with contextlib.suppress(zmq.ZMQError):
                    socket.send_multipart([peer, answer], zmq.NOBLOCK)

    def _tell_status(self) -> None:
        with self._lock:
            asked = list(self._asked or ())
            if self._asked:
                self._asked.clear()
        if asked:
            status = self._desk.status(self._clock())
            for answer in asked:
                answer.put(status)
