"""A channel whose peers ask each other over Unix sockets."""

import contextlib
import json
import socket
import threading

from acme_socket.connection import SocketConnection
from acme_socket.memory import Memory
from acme_socket.options import SocketOptions
from acme_socket.wire import ANSWER, ASK, EXPORT, MAGIC, demand_same_user, name_of, receive
from kvferry.api import ChannelContext, ErrorKind, KVFerryError, Region, Retry


class SocketChannel:
    """One listener, a thread for each peer that came, and one for each connection that we made."""

    def __init__(self, options: SocketOptions) -> None:
        self._prefix = options.prefix
        self._memory = Memory()
        self._lock = threading.Lock()
        self._state = "not open yet"
        self._context: ChannelContext | None = None
        self._listener: socket.socket | None = None
        self._guests: dict[socket.socket, threading.Thread] = {}
        self._connections: set[SocketConnection] = set()

    # -- the contract ----------------------------------------------------------------------------

    def open(self, context: ChannelContext) -> None:
        if self._state != "not open yet":
            raise KVFerryError(
                "a channel is opened once", kind=ErrorKind.INTERNAL, why=f"it is {self._state}"
            )
        listener = socket.socket(socket.AF_UNIX)
        try:
            listener.bind(name_of(self._prefix, context.epoch, context.rank))
            listener.listen()
        except OSError as error:
            listener.close()
            raise KVFerryError(
                "the socket cannot be made",
                kind=ErrorKind.IO,
                where=context.name,
                why=str(error),
                remedy="see that this rank is not open already",
            ) from error
        self._context, self._listener, self._state = context, listener, "open"
        self._doorman = threading.Thread(target=self._welcome, name="acme-door", daemon=True)
        self._doorman.start()

    def register(self, region: Region) -> None:
        self._demand_open()
        self._memory.add(region)

    def deregister(self, name: str) -> None:
        self._memory.remove(name)

    def export(self) -> bytes:
        context = self._demand_open()
        return EXPORT.pack(MAGIC, context.epoch, context.rank)

    def connect(self, peer: bytes, deadline: float) -> SocketConnection:
        context = self._demand_open()
        if len(peer) != EXPORT.size or not peer.startswith(MAGIC):
            raise KVFerryError("no channel of this kind exported this", kind=ErrorKind.PROTOCOL)
        _, epoch, rank = EXPORT.unpack(peer)
        left = deadline - context.clock()
        if left <= 0:
            raise _late()
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.settimeout(left)
            sock.connect(name_of(self._prefix, epoch, rank))
            demand_same_user(sock)
            connection = SocketConnection(self, sock, self._memory, context.clock, _raise_late)
        except TimeoutError:
            sock.close()
            raise _late() from None
        except OSError as error:
            sock.close()
            raise KVFerryError(
                "nobody is there", kind=ErrorKind.IO, why=str(error), retry=Retry.LATER
            ) from error
        except BaseException:
            sock.close()
            raise
        with self._lock:
            self._connections = {each for each in self._connections if each.alive} | {connection}
        return connection

    def read(self, connection, operations, deadline: float):
        self._demand_open()
        if not isinstance(connection, SocketConnection) or connection.owner is not self:
            raise KVFerryError("the connection is another channel's", kind=ErrorKind.INTERNAL)
        return connection.submit(operations, deadline)

    def write(self, connection, operations, deadline: float):
        raise KVFerryError(
            "this channel does not write",
            kind=ErrorKind.UNSUPPORTED,
            remedy="look at the capabilities first",
        )

    def close(self, deadline: float) -> None:
        if self._state == "not open yet":
            self._state = "closed"
        if self._state == "closed":
            return
        with self._lock:
            self._state = "being closed"
            guests, connections = dict(self._guests), list(self._connections)
        reason = KVFerryError("the channel was closed", kind=ErrorKind.CLOSED)
        for connection in connections:
            connection.end(reason)
        for sock in (self._listener, *guests):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # wakes whoever waits for it
        threads = [self._doorman, *guests.values(), *(each.thread for each in connections)]
        for thread in threads:
            thread.join(max(0.0, deadline - self._context.clock()))
            if thread.is_alive():
                raise KVFerryError(
                    "something is still under way",
                    kind=ErrorKind.TIMEOUT,
                    remedy="leave the memory alone and close again later",
                    retry=Retry.LATER,
                )
        self._memory.clear()
        self._state = "closed"

    # -- peers that ask --------------------------------------------------------------------------

    def _welcome(self) -> None:
        with self._listener:
            while True:
                try:
                    guest, _ = self._listener.accept()
                except OSError:
                    return
                thread = threading.Thread(target=self._serve, args=(guest,), name="acme-serves", daemon=True)
                with self._lock:
                    if self._state != "open":
                        guest.close()
                        return
                    self._guests[guest] = thread
                thread.start()

    def _serve(self, guest: socket.socket) -> None:
        try:
            with guest:
                demand_same_user(guest)
                lengths = json.dumps(self._memory.lengths()).encode()
                guest.sendall(len(lengths).to_bytes(4, "little") + lengths)
                while True:
                    count, offset, length = ASK.unpack(receive(guest, ASK.size))
                    region = receive(guest, count).decode()
                    try:
                        data = self._memory.read(region, offset, length)
                    except KVFerryError:
                        guest.sendall(ANSWER.pack(1, 0))
                    else:
                        guest.sendall(ANSWER.pack(0, length))
                        guest.sendall(data)
        except (OSError, ValueError, KVFerryError):
            pass  # it has gone, or speaks nonsense: its own operations fail
        finally:
            with self._lock:
                self._guests.pop(guest, None)

    def _demand_open(self) -> ChannelContext:
        if self._state != "open" or self._context is None:
            raise KVFerryError(f"the channel is {self._state}", kind=ErrorKind.CLOSED)
        return self._context


def _raise_late() -> None:
    raise _late()


def _late() -> KVFerryError:
    return KVFerryError("the peer does not answer in time", kind=ErrorKind.TIMEOUT, retry=Retry.LATER)
