"""The side channel: control messages between one scheduler and its workers, beside the engine.

ZeroMQ over a Unix socket in a private folder. It works while the engine is idle and while it is
busy, because each end owns a thread. Sending never waits: messages go into a queue first.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import msgspec

from kvferry.api import ErrorKind, KVFerryError
from kvferry.data.priorities import leave_the_engines_core
from kvferry.data.questions import QUESTIONS_VERSION
from kvferry.data.wire import (
    MAXIMUM_MESSAGE_BYTES,
    WIRE_VERSION,
    Ask,
    FromWorker,
    Hello,
    Lead,
    Ready,
    Refused,
    SayHello,
    Told,
    ToWorker,
    Welcome,
    WorkerOrder,
)

if TYPE_CHECKING:
    import zmq

logger = logging.getLogger(__name__)

BEAT_SECONDS = 1.0
"""How often a worker says that it lives, and how often timers run."""
_BEAT_MILLISECONDS = int(BEAT_SECONDS * 1000)
_GREET_MILLISECONDS = 50
LOST_AFTER_SECONDS = 15.0
"""A worker that was silent for this long is treated as lost: far beyond a stall of the interpreter."""


class Desk(Protocol):
    """Answers operators' questions. Called from the server's thread alone."""

    @property
    def busy(self) -> bool:
        """Whether :meth:`work` has something to do."""
        ...

    def ask(self, peer: bytes, question: bytes) -> Told | None:
        """Take a question. The answer when it is known at once; else :meth:`work` gives it."""
        ...

    def work(self) -> tuple[bytes, Told] | None:
        """Go on for some milliseconds; an answer, and whose it is, once one is ready."""
        ...


class SideChannelServer:
    """The scheduler's end. Calls ``on_message(peer, message)`` and ``on_tick()`` from its own thread.

    ``on_message`` sees only messages of workers whose hello carried the right token and version;
    a hello is passed on too and answered with what ``on_message`` returns: None accepts it, text
    refuses it. Operators' questions with the right token and version go to ``desk``. ``clock`` is that of
    deadlines in orders and plans.
    """

    def __init__(
        self,
        endpoint: str,
        token: str,
        on_message: Callable[[FromWorker], str | None],
        on_tick: Callable[[], None],
        desk: Desk | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._desk = desk
        self._clock = clock
        self._endpoint = endpoint
        self._token = token
        self._on_message = on_message
        self._on_tick = on_tick
        self._known: dict[bytes, tuple[int, int]] = {}
        self._outgoing: deque[tuple[int, WorkerOrder]] = deque()
        self._wake: int = -1
        self._wake_lock = threading.Lock()
        self._decoder = msgspec.msgpack.Decoder(FromWorker | Ask)
        self._encoder = msgspec.msgpack.Encoder()
        self._stop: int = -1
        self._thread: threading.Thread | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None

    def open(self) -> None:
        """Bind and start the service thread. Raises :class:`KVFerryError` of kind IO."""
        import zmq

        self._context = zmq.Context()
        socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MAXIMUM_MESSAGE_BYTES)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        # An order that is dropped would never end, and so its chunks would never be free.
        socket.setsockopt(zmq.SNDHWM, 0)
        try:
            socket.bind(self._endpoint)
        except zmq.ZMQError as error:
            socket.close()
            self._context.term()
            raise KVFerryError(
                f"the side channel cannot listen at {self._endpoint}",
                kind=ErrorKind.IO,
                where="runtime_dir",
                why=str(error),
                remedy="set runtime_dir to a folder that this user may write",
            ) from error
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, args=(socket,), name="kvferry-service", daemon=True)
        self._thread.start()

    def post(self, rank: int, order: WorkerOrder) -> None:
        """Queue an order for a worker. Never waits; any thread. To a rank that is not there it goes
        nowhere."""
        self._outgoing.append((rank, order))
        self.wake()

    def wake(self) -> None:
        """Let the timers run now. Any thread."""
        with self._wake_lock:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def _run(self, socket: zmq.Socket[bytes]) -> None:
        import zmq

        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(self._stop, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        with socket:  # whatever happens: a socket left open would block close() for ever
            while True:
                busy = self._desk is not None and self._desk.busy
                ready = dict(poller.poll(0 if busy else _BEAT_MILLISECONDS))
                if self._stop in ready:
                    return
                if self._wake in ready:
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(self._wake)
                if socket in ready:
                    self._drain(socket)
                if busy:
                    self._work(socket)
                try:
                    self._on_tick()
                except Exception:
                    logger.exception("kvferry: a timer failed")
                self._send_orders(socket)

    def _drain(self, socket: zmq.Socket[bytes]) -> None:
        import zmq

        # Bounded, so that timers run under a flood of messages too.
        for _ in range(256):
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                answer = self._answer(frames)
            except Exception:
                # One message must not silence the channel for all others.
                logger.exception("kvferry: a worker's message could not be handled")
                continue
            if answer is not None:
                self._send(socket, frames[0], answer)

    def _work(self, socket: zmq.Socket[bytes]) -> None:
        assert self._desk is not None
        done = self._desk.work()
        if done is not None:
            self._send(socket, *done)

    def _send_orders(self, socket: zmq.Socket[bytes]) -> None:
        if not self._outgoing:
            return
        peers = {rank: peer for peer, (rank, _) in self._known.items()}
        while self._outgoing:
            rank, order = self._outgoing.popleft()
            if rank in peers:
                self._send(socket, peers[rank], order)

    def _send(self, socket: zmq.Socket[bytes], peer: bytes, answer: ToWorker | Told) -> None:
        import zmq

        with contextlib.suppress(zmq.ZMQError):
            socket.send_multipart([peer, self._encoder.encode(answer)], zmq.NOBLOCK)

    def _answer(self, frames: list[bytes]) -> ToWorker | Told | None:
        if len(frames) != 2:
            return None
        peer = frames[0]
        try:
            message = self._decoder.decode(frames[1])
        except msgspec.DecodeError as error:
            logger.warning("kvferry: dropped a message that is not ours: %s", error)
            return None
        if isinstance(message, Ask):
            return self._ask(peer, message)
        if isinstance(message, Hello):
            return self._greet(peer, message)
        if self._known.get(peer) != (message.rank, message.epoch):
            return SayHello()
        lead = Lead(message.clock - self._clock()) if isinstance(message, Ready) else None
        self._on_message(message)
        return lead

    def _ask(self, peer: bytes, ask: Ask) -> Told | None:
        if ask.token != self._token:
            return Told(QUESTIONS_VERSION, "the token is not this scheduler's")
        if ask.version != QUESTIONS_VERSION or self._desk is None:
            what = f"questions of version {ask.version}; this instance answers version {QUESTIONS_VERSION}"
            return Told(QUESTIONS_VERSION, what)
        return self._desk.ask(peer, ask.question)

    def _greet(self, peer: bytes, hello: Hello) -> ToWorker:
        if hello.version != WIRE_VERSION:
            return Refused(f"wire version {hello.version}, the scheduler speaks {WIRE_VERSION}")
        if hello.token != self._token:
            return Refused("the token is not this scheduler's")
        lead = hello.clock - self._clock()
        refusal = self._on_message(hello)
        if refusal is not None:
            return Refused(refusal)
        self._known[peer] = (hello.rank, hello.epoch)
        return Welcome(hello.epoch, lead)

    def close(self) -> None:
        """Stop the thread and unbind. Idempotent."""
        if self._thread is None:
            return
        os.eventfd_write(self._stop, 1)
        self._thread.join()
        self._thread = None
        with self._wake_lock:
            wake, self._wake = self._wake, -1
            os.close(wake)
        os.close(self._stop)
        assert self._context is not None
        self._context.term()


class SideChannelClient:
    """A worker's end. Connects lazily: until a token can be read, messages wait in a queue.

    ``identity`` names this worker and its epoch. ``make_hello(token)`` builds the introduction; it is
    called again whenever the scheduler asks. ``on_order`` must not block; ``on_lead`` is told
    :class:`kvferry.data.wire.Lead`, and before the first order.
    Threads: ``send`` from any thread; the callbacks run on the client's own thread.
    """

    def __init__(
        self,
        endpoint: str,
        identity: str,
        read_token: Callable[[], str | None],
        make_hello: Callable[[str], Hello],
        make_beat: Callable[[], FromWorker],
        on_refused: Callable[[str], None],
        on_order: Callable[[WorkerOrder], None] = lambda _order: None,
        on_lead: Callable[[float], None] = lambda _seconds: None,
    ) -> None:
        self._on_order = on_order
        self._on_lead = on_lead
        self._endpoint = endpoint
        self._identity = identity.encode()
        self._read_token = read_token
        self._make_hello = make_hello
        self._make_beat = make_beat
        self._on_refused = on_refused
        self._queue: deque[FromWorker] = deque()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToWorker)
        self._welcome = False
        self._greeted_with: str | None = None
        self._closing = False
        self._wake = -1
        self._wake_lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None

    def open(self) -> None:
        """Start the thread. Does not wait for the scheduler."""
        import zmq

        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._context = zmq.Context()
        self._thread = threading.Thread(target=self._run, name="kvferry-side", daemon=True)
        self._thread.start()

    def send(self, message: FromWorker) -> None:
        """Queue a message. Never waits. After :meth:`close` it goes nowhere."""
        self._queue.append(message)
        # Under a lock: the number of a descriptor that was just closed may be another's already.
        with self._wake_lock:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        import zmq

        leave_the_engines_core()

        assert self._context is not None
        socket = self._context.socket(zmq.DEALER)
        # A fixed identity, so that a connection that was cut and made again is the same peer, and
        # results on their way are not answered with a request to introduce oneself.
        socket.setsockopt(zmq.IDENTITY, self._identity)
        socket.setsockopt(zmq.LINGER, 200)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        socket.connect(self._endpoint)
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        wait = _GREET_MILLISECONDS
        with socket:
            while not self._closing:
                ready = dict(poller.poll(wait))
                if self._wake in ready:
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(self._wake)
                if socket in ready:
                    self._receive(socket)
                self._greet(socket)
                self._flush(socket)
                if self._welcome and not ready:
                    socket.send(self._encoder.encode(self._make_beat()))
                wait = _BEAT_MILLISECONDS if self._welcome else _GREET_MILLISECONDS
            self._flush(socket)

    def _greet(self, socket: zmq.Socket[bytes]) -> None:
        if self._welcome:
            return
        token = self._read_token()
        if token is None or token == self._greeted_with:
            return
        self._greeted_with = token
        socket.send(self._encoder.encode(self._make_hello(token)))

    def _flush(self, socket: zmq.Socket[bytes]) -> None:
        while self._welcome and self._queue:
            socket.send(self._encoder.encode(self._queue.popleft()))

    def _receive(self, socket: zmq.Socket[bytes]) -> None:
        import zmq

        while True:
            try:
                frame = socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = self._decoder.decode(frame)
            except msgspec.DecodeError as error:
                logger.warning("kvferry: dropped a message that is not ours: %s", error)
                continue
            if isinstance(message, Welcome):
                self._welcome = True
                self._on_lead(message.lead)
            elif isinstance(message, Lead):
                self._on_lead(message.seconds)
            elif isinstance(message, SayHello):
                self._welcome = False
                self._greeted_with = None
            elif isinstance(message, WorkerOrder):
                try:
                    self._on_order(message)
                except Exception:
                    logger.exception("kvferry: an order could not be taken")
            else:
                self._welcome = False
                self._on_refused(message.reason)

    def close(self) -> None:
        """Send what is queued if the scheduler is there, and stop. Idempotent."""
        if self._thread is None:
            return
        self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        self._thread = None
        with self._wake_lock:
            wake, self._wake = self._wake, -1
            os.close(wake)
        assert self._context is not None
        self._context.term()
