"""A secret that the directory and all who use it share, and the keys that follow from it.

ZeroMQ's CURVE encrypts, and lets nobody in who does not know the key of the server. That key is derived from
the secret, so whoever knows the secret knows the key, and it needs no files of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import field, frozen

from kvferry.api import ErrorKind, KVFerryError, Retry

if TYPE_CHECKING:
    import zmq

LEAST_BYTES = 16
"""Who sees a connection may try secrets at leisure, so a short one protects nothing."""
LARGEST_BYTES = 4096
_PURPOSE = b"kvferry-p2p-key1"
"""Of the derivation, as BLAKE2b's person: 16 bytes at the most, and part of the protocol."""
KEY_BYTES = 32
_LONGER = "use a long random one, such as  openssl rand -hex 32  prints"


@frozen
class SharedSecret:
    """Text that both sides know. ``where`` says where it was found, for errors.

    Raises :class:`kvferry.api.KVFerryError` for one that is too short or too long.
    """

    value: bytes = field(repr=False)
    where: str = "secret"

    def __attrs_post_init__(self) -> None:
        size = len(self.value)
        if not LEAST_BYTES <= size <= LARGEST_BYTES:
            raise KVFerryError(
                "the shared secret is too short" if size < LEAST_BYTES else "the shared secret is too long",
                kind=ErrorKind.CONFIG,
                where=self.where,
                why=f"it has {size} bytes, and {LEAST_BYTES} to {LARGEST_BYTES} are allowed",
                remedy=_LONGER,
                retry=Retry.AFTER_CHANGE,
            )

    def protect_server(self, socket: zmq.Socket[bytes]) -> None:
        """Let only those in who know the secret. Before the socket is bound."""
        key = self._server_key()
        socket.setsockopt(_zmq().CURVE_SERVER, 1)
        socket.setsockopt(_zmq().CURVE_SECRETKEY, key)

    def protect_client(self, socket: zmq.Socket[bytes], random: bytes) -> None:
        """Talk to a server that knows the secret, and to no other. Before the socket is connected.
        ``random`` are 32 bytes that nobody else knows."""
        from zmq.utils import z85

        zmq = _zmq()
        own = z85.encode(random)
        socket.setsockopt(zmq.CURVE_SERVERKEY, zmq.curve_public(self._server_key()))
        socket.setsockopt(zmq.CURVE_SECRETKEY, own)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, zmq.curve_public(own))

    def _server_key(self) -> bytes:
        """Z85 text of the server's secret key."""
        from zmq.utils import z85

        if not _zmq().has("curve"):
            raise KVFerryError(
                "this build of ZeroMQ cannot encrypt, so a shared secret cannot be used",
                kind=ErrorKind.UNSUPPORTED,
                where=self.where,
                why="libzmq was built without CURVE",
                remedy="install pyzmq from its wheels, or a libzmq with libsodium",
                retry=Retry.AFTER_CHANGE,
            )
        digest = hashlib.blake2b(self.value, digest_size=KEY_BYTES, person=_PURPOSE).digest()
        return bytes(z85.encode(digest))


def secret_of_file(path: str) -> SharedSecret:
    """What stands in a file, without blanks and ends of lines around it. Raises
    :class:`kvferry.api.KVFerryError` when it cannot be read."""
    try:
        with Path(path).open("rb") as file:
            text = file.read(2 * LARGEST_BYTES)
    except OSError as error:
        raise KVFerryError(
            "the file with the shared secret cannot be read",
            kind=ErrorKind.CONFIG,
            where=path,
            why=error.strerror or str(error),
            remedy="name a file that this user may read, in folders that this user may enter",
            retry=Retry.AFTER_CHANGE,
        ) from error
    return SharedSecret(text.strip(), path)


def secret_of_variable(name: str, variables: Mapping[str, str]) -> SharedSecret:
    """What an environment variable holds. Raises :class:`kvferry.api.KVFerryError` when it is not set."""
    text = variables.get(name, "")
    if not text:
        raise KVFerryError(
            f"the variable {name} holds no secret",
            kind=ErrorKind.CONFIG,
            where=f"variable {name}",
            why="it is empty" if name in variables else "it is not set",
            remedy="set it to the same text for the directory and all instances",
            retry=Retry.AFTER_CHANGE,
        )
    return SharedSecret(text.encode(errors="surrogateescape").strip(), f"variable {name}")


def find_secret(file: str, variable: str, variables: Mapping[str, str]) -> SharedSecret | None:
    """From wherever one is named; ``None`` where none is. Raises :class:`kvferry.api.KVFerryError` when it
    cannot be had, and when two are named."""
    if file and variable:
        raise KVFerryError(
            "two places of the shared secret are named",
            kind=ErrorKind.CONFIG,
            why=f"the file {file} and the variable {variable}",
            remedy="name one of them",
            retry=Retry.AFTER_CHANGE,
        )
    if file:
        return secret_of_file(file)
    return secret_of_variable(variable, variables) if variable else None


def _zmq() -> Any:
    import zmq

    return zmq
