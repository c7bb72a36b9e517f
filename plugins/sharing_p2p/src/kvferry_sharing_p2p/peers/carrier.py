"""Messages between the schedulers of instances over ZeroMQ, beside what the directory is told and asked."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from attrs import define, field, frozen

from kvferry.api import Answer, Candidate, ErrorKind, KVFerryError, PeerAsk, PeerCard, PeerHost, PeerId, Retry
from kvferry_sharing_p2p.directory.answers import Found
from kvferry_sharing_p2p.directory.publisher import Identity, PublisherOptions
from kvferry_sharing_p2p.likeness_rules import EPOCH_ID
from kvferry_sharing_p2p.network.client import DirectoryClient
from kvferry_sharing_p2p.network.endpoint import Endpoint, parse_url
from kvferry_sharing_p2p.network.finds import Unanswered
from kvferry_sharing_p2p.network.line import Line, LineState
from kvferry_sharing_p2p.network.secret import SharedSecret
from kvferry_sharing_p2p.network.sockets import Bell, configure, receive
from kvferry_sharing_p2p.peers.likeness import Unlike, another_life, difference
from kvferry_sharing_p2p.peers.messages import (
    MAXIMUM_FRAME_BYTES,
    WIRE_VERSION,
    Codec,
    Declined,
    Done,
    Granted,
    Hello,
    Renew,
    Renewed,
    Stranger,
    ToHolder,
    Unwelcome,
    Welcome,
)
from kvferry_sharing_p2p.peers.reception import Reception
from kvferry_sharing_p2p.peers.translation import answer_of, ask_message, card_message, card_of

if TYPE_CHECKING:
    import zmq

logger = logging.getLogger(__name__)

HOLDERS = 3
"""Whom a find names at the most: who comes first may be busy or gone."""
CHANGES_AT_ONCE = 4096
FIND_SECONDS = 1.0
"""A directory that has not answered within this is slower than most prompts are computed."""
RENEW_SECONDS = 10.0
"""A connection that was not made for so long is begun anew."""
MOST_DIFFERENCES = 1024
"""Peers of which is remembered that the log has it; beyond that the one that was told first is forgotten."""
_RECEIVED_AT_ONCE = 256
_LONGEST_WAIT_SECONDS = 3600.0


@frozen(kw_only=True)
class CarrierSettings:
    """``listen`` is where this instance's peers reach it, ``told`` what they are told of that, if it is
    something else. ``controller`` is the directory's."""

    listen: Endpoint
    controller: Endpoint
    secret: SharedSecret | None = None
    told: Endpoint | None = None
    publisher: PublisherOptions = field(factory=PublisherOptions)


@define(eq=False)
class _Acquaintance:
    """A peer that was greeted, and the connection to it."""

    peer: PeerId
    line: Line
    welcome: bool = False


class PeerNetworkCarrier:
    """A :class:`kvferry.api.PeerCarrier`. One thread and one context of its own, for the listener and for a
    connection to each peer that is asked; and the thread of the :class:`DirectoryClient`.

    ``clock`` is that of deadlines; ``random`` gives bytes that nobody can guess.
    """

    def __init__(
        self, settings: CarrierSettings, *, clock: Callable[[], float], random: Callable[[int], bytes]
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._random = random
        self._codec = Codec()
        self._lock = threading.Lock()
        self._jobs: deque[Callable[[], None]] = deque()
        self._acquaintances: dict[PeerId, _Acquaintance] = {}
        self._said: dict[PeerId, None] = {}
        self._closing = False
        self._bell: Bell | None = None
        self._thread: threading.Thread | None = None
        self._client: DirectoryClient | None = None
        self._host: PeerHost | None = None
        self._card: PeerCard | None = None
        self._reception: Reception | None = None

    def open(self, host: PeerHost, card: PeerCard) -> None:
        import zmq

        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            listener, bound = self._listen(context)
        except BaseException:
            context.destroy(0)
            raise
        self._host, self._card = host, card
        self._reception = Reception(host.desk, card)
        told = self._settings.told or self._settings.listen
        address = Endpoint(told.host, told.port or bound.port).url.encode()
        self._client = DirectoryClient(
            self._settings.controller,
            self._settings.secret,
            Identity(
                instance=card.id.instance,
                epoch=card.id.epoch,
                namespace=card.namespace,
                ranks=len(card.ranks),
                address=address,
            ),
            _Source(host),
            self._settings.publisher,
            clock=self._clock,
            random=self._random,
        )
        self._client.open()
        self._bell = Bell()
        self._thread = threading.Thread(
            target=self._run, args=(context, listener, self._bell), name="kvferry-peers", daemon=True
        )
        self._thread.start()

    def served(self) -> None:
        client, host = self._opened()
        while True:
            changes = host.take_servable(CHANGES_AT_ONCE)
            if changes.lost:
                client.changes_lost()
                continue
            if not changes.added and not changes.removed:
                return
            client.added(changes.added)
            client.removed(changes.removed)

    def find(self, quest: int, digests: Sequence[bytes], deadline: float) -> None:
        client, host = self._opened()
        assert self._card is not None

        def told(outcome: Found | Unanswered) -> None:
            holders = outcome.holders if isinstance(outcome, Found) else ()
            host.found(
                quest,
                [
                    Candidate(
                        peer=PeerId(holder.instance, holder.epoch),
                        address=holder.address,
                        chunks=holder.chunks,
                    )
                    for holder in holders
                ],
            )

        try:
            until = min(deadline, self._clock() + FIND_SECONDS)
            client.find(self._card.namespace, b"".join(digests), HOLDERS, until, told)
        except KVFerryError:
            host.found(quest, ())

    def greet(self, peer: PeerId, address: bytes) -> None:
        self._do(lambda: self._greet(peer, address))

    def ask(self, peer: PeerId, ask: PeerAsk) -> None:
        self._tell(peer, ask_message(ask))

    def renew(self, peer: PeerId, number: int, turn: int) -> None:
        self._tell(peer, Renew(number, turn))

    def done(self, peer: PeerId, number: int) -> None:
        self._tell(peer, Done(number))

    def answer(self, peer: PeerId, answer: Answer) -> None:
        self._do(lambda: self._answer_late(peer, answer))

    def close(self, deadline: float) -> None:
        if self._client is not None:
            self._client.close(deadline)
        if self._thread is None or self._bell is None:
            return
        self._closing = True
        self._bell.ring()
        self._thread.join(max(0.0, deadline - self._clock()))
        if self._thread.is_alive():
            raise KVFerryError(
                "the connections to peers do not end",
                kind=ErrorKind.TIMEOUT,
                where=str(self._settings.listen),
                why="their thread still answers a peer",
                remedy="close again later",
                retry=Retry.LATER,
            )
        self._thread = None
        self._bell.close()

    def _opened(self) -> tuple[DirectoryClient, PeerHost]:
        assert self._client is not None, "open() was not called"
        assert self._host is not None, "open() was not called"
        return self._client, self._host

    def _do(self, job: Callable[[], None]) -> None:
        with self._lock:
            self._jobs.append(job)
        if self._bell is not None:
            self._bell.ring()

    def _tell(self, peer: PeerId, message: ToHolder) -> None:
        self._do(lambda: self._send(peer, message))

    def _listen(self, context: zmq.Context[zmq.Socket[bytes]]) -> tuple[zmq.Socket[bytes], Endpoint]:
        import zmq

        listen = self._settings.listen
        socket = context.socket(zmq.ROUTER)
        try:
            wanted = listen.resolved()
            if self._settings.secret is None and not wanted.is_loopback():
                raise KVFerryError(
                    f"a listener at {listen} needs a shared secret",
                    kind=ErrorKind.CONFIG,
                    where=str(listen),
                    why="others than this machine can reach it, and could read the cache",
                    remedy="give all instances one secret, or listen at 127.0.0.1",
                    retry=Retry.AFTER_CHANGE,
                )
            configure(socket, MAXIMUM_FRAME_BYTES)
            socket.setsockopt(zmq.IPV6, int(wanted.is_version_6))
            if self._settings.secret is not None:
                self._settings.secret.protect_server(socket)
            socket.bind(wanted.url)
            return socket, parse_url(socket.getsockopt_string(zmq.LAST_ENDPOINT))
        except (OSError, zmq.ZMQError) as error:
            socket.close()
            raise KVFerryError(
                f"peers cannot be listened for at {listen}",
                kind=ErrorKind.IO,
                where=str(listen),
                why=str(error),
                remedy="choose an address of this machine, and a port that is free",
                retry=Retry.AFTER_CHANGE,
            ) from error

    # -- the carrier's thread ----------------------------------------------------------------------

    def _run(self, context: zmq.Context[zmq.Socket[bytes]], listener: zmq.Socket[bytes], bell: Bell) -> None:
        self._context = context
        self._listener = listener
        try:
            self._serve(listener, bell)
        except Exception:
            logger.exception("kvferry: the connections to peers have failed")
        finally:
            for known in self._acquaintances.values():
                known.line.close()
            listener.close(0)
            context.term()

    def _serve(self, listener: zmq.Socket[bytes], bell: Bell) -> None:
        import zmq

        while not self._closing:
            poller = zmq.Poller()
            poller.register(listener, zmq.POLLIN)
            poller.register(bell.descriptor, zmq.POLLIN)
            for known in self._acquaintances.values():
                for source in known.line.sources:
                    poller.register(source, zmq.POLLIN)
            ready = dict(poller.poll(self._wait_milliseconds()))
            if bell.descriptor in ready:
                bell.hush()
            self._answer(listener)
            for known in list(self._acquaintances.values()):
                self._hear(known)
            self._take_jobs()

    def _wait_milliseconds(self) -> int:
        due = min((known.line.due() for known in self._acquaintances.values()), default=math.inf)
        return math.ceil(1000 * min(max(due - self._clock(), 0.0), _LONGEST_WAIT_SECONDS))

    def _take_jobs(self) -> None:
        with self._lock:
            jobs = list(self._jobs)
            self._jobs.clear()
        for job in jobs:
            try:
                job()
            except Exception:
                logger.exception("kvferry: a message to a peer could not be sent")

    def _answer(self, listener: zmq.Socket[bytes]) -> None:
        assert self._reception is not None
        for _ in range(_RECEIVED_AT_ONCE):
            frames = receive(listener, 2)
            if frames is None:
                return
            if not frames:
                self._reception.rejected += 1
                continue
            connection, frame = frames
            try:
                answer = self._reception.answer(connection, frame)
            except Exception:
                # One message must not silence this instance for all others.
                logger.exception("kvferry: what a peer asked could not be answered")
                continue
            if answer is not None:
                self._reply(connection, answer)

    def _answer_late(self, peer: PeerId, answer: Answer) -> None:
        assert self._reception is not None
        way = self._reception.late_answer(peer, answer)
        if way is not None:
            self._reply(*way)

    def _reply(self, connection: bytes, frame: bytes) -> None:
        import zmq

        # As if it had been lost on the way: the asker has deadlines, leases end.
        with contextlib.suppress(zmq.ZMQError):
            self._listener.send_multipart([connection, frame], zmq.NOBLOCK)

    def _greet(self, peer: PeerId, address: bytes) -> None:
        _, host = self._opened()
        for other in [each for each in self._acquaintances if each.instance == peer.instance]:
            self._acquaintances.pop(other).line.close()
        try:
            endpoint = parse_url(address.decode("ascii"))
        except ValueError as error:
            host.lost(peer, f"its address is none: {error}")
            return
        line = Line(
            self._context,
            endpoint,
            self._settings.secret,
            random=self._random,
            now=self._clock(),
            renew_seconds=RENEW_SECONDS,
            most_bytes=MAXIMUM_FRAME_BYTES,
        )
        self._acquaintances[peer] = _Acquaintance(peer, line)

    def _hear(self, known: _Acquaintance) -> None:
        now = self._clock()
        for _ in range(_RECEIVED_AT_ONCE):
            frame = known.line.receive()
            if frame is None:
                break
            self._take(known, frame)
            if self._acquaintances.get(known.peer) is not known:
                return  # what it said was the end of the acquaintance, and of the connection
        for state in known.line.look(now):
            if state is LineState.CONNECTED:
                assert self._card is not None
                hello = Hello(WIRE_VERSION, known.peer.epoch, card_message(self._card))
                known.line.send(self._codec.encode(hello))
            else:
                self._part(known, "the connection broke")
                return
        if known.line.renew_if_due(now):
            self._part(known, "nobody answers at its address")

    def _take(self, known: _Acquaintance, frame: bytes) -> None:
        _, host = self._opened()
        assert self._card is not None
        try:
            message = self._codec.read_to_asker(frame, known.peer.instance)
        except KVFerryError as error:
            self._part(known, error.what)
            return
        match message:
            case Welcome():
                card = card_of(message.card)
                unlike = another_life(known.peer.epoch, card.id.epoch) or difference(self._card, card)
                if unlike is not None:
                    self._differ(known, unlike)
                elif card.id != known.peer:
                    self._part(known, "it is another instance")
                elif not known.welcome:
                    known.welcome = True
                    host.agreed(card)
            case Unwelcome():
                # What others write goes into the log on one line.
                rule, reason = (" ".join(text.split()) for text in (message.rule, message.reason))
                self._differ(known, Unlike(rule, reason))
            case Stranger():
                self._part(known, "it does not know this instance any more")
            case Granted() | Declined():
                host.answered(known.peer, answer_of(message))
            case Renewed():
                host.renewed(known.peer, message.number, message.turn, message.seconds)

    def _differ(self, known: _Acquaintance, unlike: Unlike) -> None:
        """Part for a reason that people may have to mend, and say so once."""
        # A restart that the directory has not heard of yet passes by itself.
        if unlike.rule != EPOCH_ID and known.peer not in self._said:
            while len(self._said) >= MOST_DIFFERENCES:
                del self._said[next(iter(self._said))]
            self._said[known.peer] = None
            logger.warning(
                "kvferry: nothing is read from instance %s, because the two differ: %s",
                known.peer.instance,
                unlike,
            )
        self._part(known, str(unlike))

    def _part(self, known: _Acquaintance, reason: str) -> None:
        _, host = self._opened()
        if self._acquaintances.get(known.peer) is known:
            del self._acquaintances[known.peer]
            known.line.close()
            host.lost(known.peer, reason)

    def _send(self, peer: PeerId, message: ToHolder) -> None:
        known = self._acquaintances.get(peer)
        # What does not go out is as if it had been lost on the way: the asker has deadlines, leases end.
        if known is not None:
            known.line.send(self._codec.encode(message))


@frozen
class _Source:
    """Everything that can be served, for the directory."""

    host: PeerHost

    def walk(self, cursor: int, limit: int) -> tuple[bytes, int | None]:
        digests, cursor_behind = self.host.walk_servable(cursor, limit)
        return b"".join(digests), cursor_behind
