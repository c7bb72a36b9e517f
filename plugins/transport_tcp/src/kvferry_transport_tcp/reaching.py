"""Opens sockets to one peer."""

from __future__ import annotations

import contextlib
import secrets
import socket
from collections.abc import Callable, Iterator
from typing import Any

from attrs import frozen

from kvferry.api import ChannelContext, ErrorKind, KVFerryError, Retry
from kvferry_transport_tcp.export import Export
from kvferry_transport_tcp.faults import garbled, refused, system_fault
from kvferry_transport_tcp.handshake import Refused, Side, introduce
from kvferry_transport_tcp.peer_clock import PeerClock
from kvferry_transport_tcp.sockets import Cuttable, set_up
from kvferry_transport_tcp.wire import NONCE_BYTES, WIRE_VERSION, Hello, Role, WireError


@frozen
class Caller:
    """Who calls whom. Any thread."""

    export: Export
    context: ChannelContext
    secret: bytes
    connection: bytes
    """16 random bytes that all sockets of one connection name."""

    @property
    def peer(self) -> str:
        """The peer in messages."""
        name = f"{self.export.instance} rank {self.export.rank}" if self.export.instance else "peer"
        return f"{name} at {self.export.address}"

    def call(
        self,
        role: Role,
        peer_clock: PeerClock,
        deadline: float,
        held: Callable[[Cuttable], None] = lambda line: None,
    ) -> Cuttable:
        """A socket to the peer, after its opening. ``held`` gets it before anything waits, to cut it when
        it is not wanted any more.

        Raises :class:`KVFerryError` like :meth:`kvferry.api.Channel.connect`.
        """
        if self.export.version != WIRE_VERSION:
            raise KVFerryError(
                "the peer cannot be connected to",
                kind=ErrorKind.PROTOCOL,
                where=self.peer,
                why=f"its wire protocol has version {self.export.version}, and ours {WIRE_VERSION}",
                remedy="let both sides run the same release",
                retry=Retry.AFTER_CHANGE,
            )
        with self.told(deadline):
            family, where = self._find()
            line = Cuttable(socket.socket(family, socket.SOCK_STREAM))
            try:
                held(line)
                self._open(line.sock, where, role, peer_clock, deadline)
            except BaseException:
                line.close()
                raise
            return line

    @contextlib.contextmanager
    def told(self, deadline: float) -> Iterator[None]:
        """What fails within, as an error of ours."""
        try:
            yield
        except Refused as error:
            raise refused(error.reason, self.peer) from error
        except WireError as error:
            raise garbled(self.peer, str(error)) from None
        except OSError as error:
            if isinstance(error, TimeoutError) or self.context.clock() >= deadline:
                raise KVFerryError(
                    "the peer cannot be connected to",
                    kind=ErrorKind.TIMEOUT,
                    where=self.peer,
                    why="it did not answer in time",
                    remedy="look whether it is well, and the network between",
                    retry=Retry.LATER,
                ) from error
            raise system_fault(
                error,
                "the peer cannot be connected to",
                self.peer,
                "look whether it runs, and listens at an address that can be reached from here",
            ) from error

    def _find(self) -> tuple[int, Any]:
        found = socket.getaddrinfo(
            self.export.address.host, self.export.address.port, type=socket.SOCK_STREAM
        )
        family, _, _, _, where = found[0]
        return family, where

    def _open(
        self, sock: socket.socket, where: Any, role: Role, peer_clock: PeerClock, deadline: float
    ) -> None:
        left = deadline - self.context.clock()
        if left <= 0:
            raise TimeoutError("the time is over")
        set_up(sock)
        sock.settimeout(left)
        sock.connect(where)
        side = Side(clock=self.context.clock, deadline=deadline, secret=self.secret)
        welcome = introduce(sock, self._hello(role), side)
        peer_clock.seen(welcome.time)
        sock.settimeout(None)

    def _hello(self, role: Role) -> Hello:
        return Hello(
            role=role,
            secret=bool(self.secret),
            nonce=secrets.token_bytes(NONCE_BYTES),
            connection=self.connection,
            wanted_epoch=self.export.epoch,
            epoch=self.context.epoch,
            rank=self.context.rank,
            instance=self.context.instance,
        )
