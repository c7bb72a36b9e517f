"""An instance's connection to the directory: it publishes, and finds who has what."""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from kvferry.api import DIGEST_BYTES, ErrorKind, KVFerryError
from kvferry_sharing_p2p.directory.messages import (
    MAXIMUM_FRAME_BYTES,
    MAXIMUM_HOLDERS,
    MAXIMUM_KEYS,
    WIRE_VERSION,
    Answer,
    Codec,
    Find,
    FromDirectory,
    ToDirectory,
)
from kvferry_sharing_p2p.directory.publisher import (
    Identity,
    KeySource,
    Publisher,
    PublisherOptions,
)
from kvferry_sharing_p2p.network.endpoint import Endpoint
from kvferry_sharing_p2p.network.finds import Finds, OnAnswer, Unanswered
from kvferry_sharing_p2p.network.line import Line, LineState
from kvferry_sharing_p2p.network.reach import ClientStatus, Complaints, Reach
from kvferry_sharing_p2p.network.secret import SharedSecret
from kvferry_sharing_p2p.network.sockets import Bell

if TYPE_CHECKING:
    import zmq

logger = logging.getLogger(__name__)

SILENT_SECONDS = 5.0
"""Beyond that a directory that was asked something and says nothing counts as gone."""
_RECEIVED_AT_ONCE = 256
_LONGEST_WAIT_SECONDS = 3600.0


class DirectoryClient:
    """Follows what this instance can serve, and finds what others can. It owns a thread and a socket.

    ``source`` is walked, and answers are given, on that thread: neither may wait. ``endpoint`` is the
    controller's, with a number or a name; a name is resolved each time it is connected to. ``clock`` gives
    seconds and does not go back; deadlines are its times. ``random`` gives bytes that nobody can guess. After
    ``silent_seconds`` without a word a directory that was asked something counts as gone, so that requests do
    not wait for their deadlines in vain.

    Threads: ``open`` and ``close`` from one; the rest from any. Nothing but ``close`` waits.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        secret: SharedSecret | None,
        identity: Identity,
        source: KeySource,
        options: PublisherOptions,
        *,
        clock: Callable[[], float],
        random: Callable[[int], bytes],
        silent_seconds: float = SILENT_SECONDS,
    ) -> None:
        self._endpoint = endpoint
        self._secret = secret
        self._identity = identity
        self._clock = clock
        self._random = random
        self._silent_seconds = silent_seconds
        self._publisher = Publisher(identity, source, options)
        self._finds = Finds()
        self._codec = Codec()
        self._lock = threading.Lock()
        self._orders: deque[Callable[[float], None]] | None = None
        """What other threads want, done on ours; None while nothing is taken."""
        self._complaints = Complaints(endpoint)
        self._waiting_since: float | None = None
        """Since when something is not answered; None if nothing is."""
        self._unreadable = 0
        self._status = self._look(0.0, LineState.NOBODY)
        self._closing = False
        self._line: Line | None = None
        self._bell: Bell | None = None
        self._thread: threading.Thread | None = None

    def open(self) -> None:
        """Start, once. Does not wait for the directory.

        Raises :class:`kvferry.api.KVFerryError`: ``INTERNAL`` the second time, ``UNSUPPORTED`` when ZeroMQ
        lacks what a secret needs.
        """
        import zmq

        if self._bell is not None:
            raise KVFerryError(
                "a connection to the directory is opened once",
                kind=ErrorKind.INTERNAL,
                where=self._endpoint.url,
                remedy="make another one",
            )
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            line = Line(
                context,
                self._endpoint,
                self._secret,
                random=self._random,
                now=self._clock(),
                renew_seconds=2 * self._silent_seconds,
                most_bytes=MAXIMUM_FRAME_BYTES,
            )
        except BaseException:
            context.destroy(0)
            raise
        self._bell = Bell()
        self._orders = deque()
        self._thread = threading.Thread(
            target=self._run, args=(context, line, self._bell), name="kvferry-directory", daemon=True
        )
        self._thread.start()

    def added(self, digests: Iterable[bytes]) -> None:
        """These can be served from now on. Goes nowhere before ``open`` and after ``close``."""
        told = list(digests)
        self._order(lambda now: self._publisher.added(told, now))

    def removed(self, digests: Iterable[bytes]) -> None:
        """These cannot be served any more. Goes nowhere before ``open`` and after ``close``."""
        told = list(digests)
        self._order(lambda now: self._publisher.removed(told, now))

    def changes_lost(self) -> None:
        """Changes happened that nobody can name: all keys are told anew."""
        self._order(lambda _now: self._publisher.changes_lost())

    def find(
        self, namespace: bytes, digests: bytes, limit: int, deadline: float, on_answer: OnAnswer
    ) -> None:
        """Who, other than this instance, has the longest beginning of ``digests``, which are one behind the
        other? ``on_answer`` is called exactly once, on the client's thread: with up to ``limit`` holders, or
        with why there is no answer, soon after ``deadline`` at the latest. Digests beyond
        ``MAXIMUM_KEYS`` are not asked for.

        Raises ``ValueError`` for what cannot be asked, and :class:`kvferry.api.KVFerryError` of kind
        ``CLOSED`` before ``open`` and after ``close``; ``on_answer`` is not called then.
        """
        if len(namespace) != DIGEST_BYTES or len(digests) % DIGEST_BYTES:
            raise ValueError(f"a namespace, and each digest, has {DIGEST_BYTES} bytes")
        if not 1 <= limit <= MAXIMUM_HOLDERS:
            raise ValueError(f"the limit is {limit}, and 1 to {MAXIMUM_HOLDERS} can be asked for")
        asked = digests[: MAXIMUM_KEYS * DIGEST_BYTES]
        if not self._order(lambda now: self._find(namespace, asked, limit, deadline, on_answer, now)):
            raise KVFerryError(
                "the connection to the directory is not open",
                kind=ErrorKind.CLOSED,
                where=self._endpoint.url,
            )

    def status(self) -> ClientStatus:
        """How things stood when the client's thread last looked."""
        return self._status

    def close(self, deadline: float) -> None:
        """Tell the directory that this instance ends, if it is there, and stop. Finds under way end with
        ``CLOSED``. Idempotent.

        Raises :class:`kvferry.api.KVFerryError` of kind ``TIMEOUT`` when the thread has not ended by then,
        because of a callback that waits; ``close`` may be called again.
        """
        if self._thread is None or self._bell is None:
            return
        self._closing = True
        self._bell.ring()
        self._thread.join(max(0.0, deadline - self._clock()))
        if self._thread.is_alive():
            raise KVFerryError(
                "the connection to the directory does not end",
                kind=ErrorKind.TIMEOUT,
                where=self._endpoint.url,
                why="its thread is inside of a callback, or of the walk over all keys",
                remedy="callbacks and walks must not wait",
            )
        self._thread = None
        self._bell.close()

    def _order(self, order: Callable[[float], None]) -> bool:
        with self._lock:
            if self._orders is None or self._bell is None:
                return False
            self._orders.append(order)
            first = len(self._orders) == 1
        if first:
            self._bell.ring()
        return True

    # -- the client's thread -----------------------------------------------------------------------

    def _run(self, context: zmq.Context[zmq.Socket[bytes]], line: Line, bell: Bell) -> None:
        try:
            self._serve(line, bell)
            for message in self._publisher.leave():
                line.send(self._codec.encode(message))
        except Exception:
            logger.exception("kvferry: the connection to the directory has failed")
        finally:
            with self._lock:
                orders, self._orders = self._orders, None
            now = self._clock()
            self._line = None
            for order in orders or ():
                self._do(order, now)
            self._finds.end_all(Unanswered.CLOSED)
            self._status = self._look(now, None)
            line.close()
            context.term()

    def _serve(self, line: Line, bell: Bell) -> None:
        self._line = line
        poller = _poller(line, bell)
        while True:
            ready = dict(poller.poll(self._wait_milliseconds(line)))
            if bell.descriptor in ready:
                bell.hush()
            if self._closing:
                return
            now = self._clock()
            # What came counts before the connection is taken for lost.
            self._receive(line, now)
            for state in line.look(now):
                self._connection_changed(state, now)
            if line.renew_if_due(now):
                poller = _poller(line, bell)
            self._take_orders(now)
            self._finds.end_overdue(self._clock())
            self._publish(line, self._clock())
            self._status = self._look(now, line.state)
            self._complaints.look(self._status)

    def _wait_milliseconds(self, line: Line) -> int:
        publisher = self._publisher.due() if line.state is LineState.CONNECTED else math.inf
        now = self._clock()
        silent = math.inf
        if self._waiting_since is not None and self._waiting_since + self._silent_seconds > now:
            silent = self._waiting_since + self._silent_seconds
        seconds = min(publisher, self._finds.due(), line.due(), silent) - now
        return math.ceil(1000 * min(max(seconds, 0.0), _LONGEST_WAIT_SECONDS))

    def _connection_changed(self, state: LineState, now: float) -> None:
        if state is LineState.CONNECTED:
            logger.info("kvferry: connected to the directory at %s", self._endpoint.url)
            self._waiting_since = None
            self._publisher.reconnected(now)
        else:
            logger.warning(
                "kvferry: the directory at %s is gone; what it finds is missed", self._endpoint.url
            )
            self._waiting_since = None
            # An answer would come over the connection that was.
            self._finds.end_all(Unanswered.GONE)

    def _take_orders(self, now: float) -> None:
        with self._lock:
            orders = list(self._orders or ())
            if self._orders:
                self._orders.clear()
        for order in orders:
            self._do(order, now)

    def _do(self, order: Callable[[float], None], now: float) -> None:
        try:
            order(now)
        except Exception:
            logger.exception("kvferry: the connection to the directory could not do what it was told")

    def _find(
        self, namespace: bytes, digests: bytes, limit: int, deadline: float, on_answer: OnAnswer, now: float
    ) -> None:
        line = self._line
        if line is None:
            self._finds.refuse(on_answer, Unanswered.CLOSED)
        elif deadline <= now:
            self._finds.refuse(on_answer, Unanswered.DEADLINE)
        elif self._reach(now, line.state) is not Reach.CONNECTED:
            self._finds.refuse(on_answer, Unanswered.GONE)
        elif self._finds.full:
            self._finds.refuse(on_answer, Unanswered.BUSY)
        else:
            number = self._finds.add(deadline, on_answer)
            asker = self._identity.instance
            message = Find(
                version=WIRE_VERSION,
                id=number,
                asker=asker,
                namespace=namespace,
                digests=digests,
                limit=limit,
            )
            if not self._send(line, message, now):
                self._finds.end(number, Unanswered.BUSY)

    def _publish(self, line: Line, now: float) -> None:
        if line.state is not LineState.CONNECTED or self._publisher.due() > now:
            return
        for message in self._publisher.poll(now):
            # What does not go out is sent again by the publisher, as if it had been lost on the way.
            self._send(line, message, now)

    def _send(self, line: Line, message: ToDirectory, now: float) -> bool:
        if not line.send(self._codec.encode(message)):
            return False
        if self._waiting_since is None:
            self._waiting_since = now
        return True

    def _receive(self, line: Line, now: float) -> None:
        # Bounded, so that deadlines are kept under a flood of answers too.
        for _ in range(_RECEIVED_AT_ONCE):
            frame = line.receive()
            if frame is None:
                return
            try:
                message = self._codec.read_from_directory(frame, self._endpoint.url)
            except KVFerryError as error:
                self._unreadable += 1
                if self._unreadable == 1:
                    logger.warning("kvferry: the directory sent what is not understood: %s", error)
                continue
            self._take(message, now)

    def _take(self, message: FromDirectory, now: float) -> None:
        if isinstance(message, Answer):
            self._finds.end(message.id, message.found)
        else:
            self._publisher.receive(message, now)
        self._waiting_since = now if self._finds.pending else None

    def _reach(self, now: float, state: LineState | None) -> Reach:
        match state:
            case None:
                return Reach.CLOSED
            case LineState.NOBODY:
                return Reach.NO_ANSWER
            case LineState.TURNED_AWAY:
                return Reach.TURNED_AWAY
            case LineState.CONNECTED:
                since = self._waiting_since
                return (
                    Reach.CONNECTED if since is None or now - since < self._silent_seconds else Reach.SILENT
                )

    def _look(self, now: float, state: LineState | None) -> ClientStatus:
        return ClientStatus(
            reach=self._reach(now, state),
            publisher=self._publisher.status(now),
            finds=self._finds.pending,
            unreadable=self._unreadable,
        )


def _poller(line: Line, bell: Bell) -> zmq.Poller:
    import zmq

    poller = zmq.Poller()
    for source in line.sources:
        poller.register(source, zmq.POLLIN)
    poller.register(bell.descriptor, zmq.POLLIN)
    return poller
