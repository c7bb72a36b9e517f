"""How two channels find each other and agree: sockets, and the first frames on them."""

from __future__ import annotations

import errno
import os
import secrets
import socket
import threading
import time

import msgspec

from kvferry.api import ChannelContext, ErrorKind, KVFerryError, Retry
from kvferry_transport_local.failures import errno_text
from kvferry_transport_local.frames import WIRE_VERSION, Codec, Export, Hello, Welcome
from kvferry_transport_local.link import Broken, Link
from kvferry_transport_local.options import Mechanism
from kvferry_transport_local.probing import Probe, Prober
from kvferry_transport_local.system import Credentials, boot_id
from kvferry_transport_local.tracers import Tracers

_PAUSE_SECONDS = 0.002
_BACKLOG = 128


class Meeting:
    """This end of every meeting. Threads: ``open`` and ``close`` from one, the rest from any."""

    def __init__(
        self,
        context: ChannelContext,
        codec: Codec,
        mechanism: Mechanism,
        prober: Prober,
        tracers: Tracers,
        where: str,
    ) -> None:
        self._context = context
        self._codec = codec
        self._mechanism = mechanism
        self._prober = prober
        self._tracers = tracers
        self._where = where
        self._probe = Probe()
        self._address = secrets.token_bytes(16)
        self._wanted: dict[Link, tuple[bytes, float]] = {}
        self._lock = threading.Lock()

    def listen(self) -> socket.socket:
        """A listener under an abstract name that nobody can guess and that ends with the process.

        Raises :class:`KVFerryError` when the system gives no socket.
        """
        try:
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        except OSError as error:
            raise self._no_socket(error) from error
        try:
            listener.bind(_name(self._address))
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            raise self._no_socket(error) from error
        self._tracers.open()
        return listener

    def export(self) -> bytes:
        context = self._context
        return self._codec.encode(
            Export(WIRE_VERSION, self._address, context.epoch, context.instance, context.rank, boot_id())
        )

    def read_export(self, peer: bytes) -> Export:
        """Raises :class:`KVFerryError` as :meth:`kvferry.api.Channel.connect` says."""
        try:
            export = self._codec.export(peer)
        except msgspec.DecodeError as error:
            raise self._no_export(f"they cannot be read: {error}") from error
        if export.version != WIRE_VERSION:
            raise self._no_export(f"they have version {export.version}, not {WIRE_VERSION}")
        if export.boot != boot_id():
            raise KVFerryError(
                "the peer is on another host",
                kind=ErrorKind.IO,
                where=self._where,
                why=f"instance {export.instance!r} exported itself there, or before this host's last start",
                remedy="use the channel tcp between hosts",
                retry=Retry.AFTER_CHANGE,
            )
        return export

    def call(self, export: Export, deadline: float) -> Link:
        """A connection on which nothing was said yet. Raises :class:`KVFerryError`."""
        end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        link = Link(end, True, self._codec, f"{self._where} to instance {export.instance!r}")
        try:
            self._dial(end, export, deadline)
            self._trust(link)
        except OSError as error:
            link.discard()
            raise self._nobody(export, error) from error
        except KVFerryError:
            link.discard()
            raise
        self._tracers.allow(link.pid)
        with self._lock:
            self._wanted[link] = (export.epoch, time.monotonic())
        return link

    def answer(self, end: socket.socket) -> Link | None:
        """Somebody called; ``None`` for one who is not let in. The socket is closed then."""
        end.setblocking(False)
        link = Link(end, False, self._codec, f"{self._where} from a peer")
        try:
            self._trust(link)
        except (OSError, KVFerryError):
            # Told nothing: whoever is not of this user has no business here.
            link.discard()
            return None
        self._tracers.allow(link.pid)
        link.hello_by = self._context.clock() + self._context.operation_seconds
        return link

    def hello(self, export: Export) -> Hello:
        context = self._context
        return Hello(
            WIRE_VERSION,
            context.epoch,
            context.instance,
            context.rank,
            export.epoch,
            self._probe.token,
            self._probe.address,
        )

    def welcome(self) -> Welcome:
        return Welcome(self._context.epoch, self._probe.token, self._probe.address, time.monotonic())

    def greeted(self, link: Link, frame: Hello, page_fd: int) -> KVFerryError | None:
        """A caller introduced itself; why it is refused. Takes over ``page_fd``; raises :class:`Broken`."""
        refusal = self._refusal(frame)
        if refusal is not None:
            if page_fd >= 0:
                os.close(page_fd)
            return refusal
        link.introduce(page_fd)
        link.where = f"{self._where} from instance {frame.instance!r}"
        self._try(link, frame.probe_address, frame.probe)
        return None

    def welcomed(self, link: Link, frame: Welcome, page_fd: int) -> None:
        """The answer to our hello. Takes over ``page_fd``; raises :class:`Broken`."""
        with self._lock:
            epoch, called = self._wanted.pop(link, (b"", 0.0))
        if frame.epoch != epoch:
            if page_fd >= 0:
                os.close(page_fd)
            raise Broken("it is of another epoch")
        link.introduce(page_fd)
        # The clocks are one, except between time namespaces. Then the earliest that fits is taken: a write
        # may end early by the time that a greeting took, and never late.
        earliest, latest = frame.now - time.monotonic(), frame.now - called
        link.clock_offset = 0.0 if earliest <= 0.0 <= latest else earliest
        self._try(link, frame.probe_address, frame.probe)

    def parted(self, link: Link) -> None:
        """The connection is over. Once for each."""
        with self._lock:
            self._wanted.pop(link, None)
        self._tracers.release(link.pid)

    def close(self) -> None:
        self._tracers.close()

    def _dial(self, end: socket.socket, export: Export, deadline: float) -> None:
        while True:
            try:
                end.connect(_name(export.address))
            except BlockingIOError as error:  # more callers than it has taken up
                if self._context.clock() >= deadline:
                    raise KVFerryError(
                        "the peer did not take up the connection by the deadline",
                        kind=ErrorKind.TIMEOUT,
                        where=self._where,
                        why=f"its queue of callers is full: {errno_text(error.errno or errno.EAGAIN)}",
                        remedy="look whether the peer's process is stopped",
                        retry=Retry.LATER,
                    ) from error
                time.sleep(_PAUSE_SECONDS)
            else:
                return

    def _trust(self, link: Link) -> None:
        """Know the process at the other end. Raises ``OSError`` when it is gone, and
        :class:`KVFerryError` when it is another user's."""
        credentials = Credentials.of(link.end)
        if credentials.uid != os.geteuid():
            raise KVFerryError(
                "the peer's process belongs to another user",
                kind=ErrorKind.COMPATIBILITY,
                where=self._where,
                why=f"it runs as user {credentials.uid}, and this one as {os.geteuid()}",
                remedy="run both as one user, or use the channel tcp",
                retry=Retry.AFTER_CHANGE,
            )
        link.watch(credentials)

    def _try(self, link: Link, address: int, token: bytes) -> None:
        if self._mechanism is not Mechanism.MAPPED:
            link.cross_refusal = self._prober(link.pid, address, token)

    def _refusal(self, frame: Hello) -> KVFerryError | None:
        if frame.version != WIRE_VERSION:
            return KVFerryError(
                f"wire version {frame.version} against {WIRE_VERSION}", kind=ErrorKind.COMPATIBILITY
            )
        if frame.wanted != self._context.epoch:
            return KVFerryError("it wants an earlier epoch of this instance", kind=ErrorKind.PROTOCOL)
        return None

    def _no_socket(self, error: OSError) -> KVFerryError:
        return KVFerryError(
            "the system gives no local socket",
            kind=ErrorKind.IO,
            where=self._where,
            why=errno_text(error.errno or errno.EIO),
            remedy="raise the limit of open files (ulimit -n), or use the channel tcp",
            retry=Retry.AFTER_CHANGE,
        )

    def _no_export(self, why: str) -> KVFerryError:
        return KVFerryError(
            "these bytes were not exported by a local channel of this version",
            kind=ErrorKind.PROTOCOL,
            where=self._where,
            why=why,
            remedy="use one channel and one version of it on both sides",
        )

    def _nobody(self, export: Export, error: OSError) -> KVFerryError:
        return KVFerryError(
            f"nobody is there as instance {export.instance!r}",
            kind=ErrorKind.IO,
            where=self._where,
            why=errno_text(error.errno or errno.EIO),
            remedy="look whether the peer runs, in the same network namespace as this process",
            retry=Retry.LATER,
        )


def _name(address: bytes) -> str:
    return f"\0kvferry-{address.hex()}"
