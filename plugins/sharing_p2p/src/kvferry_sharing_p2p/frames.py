"""Reading frames that others have sent: typed, bounded, and never code."""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec
from attrs import frozen

from kvferry.api import ErrorKind, KVFerryError, Retry

_Message = TypeVar("_Message")
_UNREADABLE = (msgspec.MsgspecError, RecursionError, UnicodeError)


class _Versioned(msgspec.Struct, frozen=True):
    version: int | None = None


@frozen(kw_only=True)
class Dialect:
    """What two sides speak. ``sides`` and ``of`` name them in errors."""

    version: int
    most_bytes: int
    """Longer frames are refused unread."""
    sides: str
    of: str


class FrameReader(Generic[_Message]):
    """Reads messages of ``kind``, a union of tagged structs. In whatever version of a dialect, the messages
    that may come first carry it in a field ``version``. Threads: one at a time."""

    def __init__(self, dialect: Dialect, kind: object) -> None:
        self._dialect = dialect
        self._decoder: msgspec.msgpack.Decoder[_Message] = msgspec.msgpack.Decoder(kind)
        self._versioned = msgspec.msgpack.Decoder(_Versioned)

    def read(self, frame: bytes, where: str) -> _Message:
        """Raises :class:`kvferry.api.KVFerryError`: ``COMPATIBILITY`` for a message of another version,
        ``PROTOCOL`` for everything else that is not a message, ``where`` being who has sent it."""
        dialect = self._dialect
        if len(frame) > dialect.most_bytes:
            raise self._no_message(where, f"it has {len(frame)} bytes, and {dialect.most_bytes} are allowed")
        version = self._version(frame)
        if version not in (None, dialect.version):
            raise KVFerryError(
                f"a message of version {version} came, and this is version {dialect.version}",
                kind=ErrorKind.COMPATIBILITY,
                where=where,
                why=f"{dialect.sides} are of different releases",
                remedy="install the same release of kvferry-sharing-p2p everywhere",
                retry=Retry.AFTER_CHANGE,
            )
        try:
            return self._decoder.decode(frame)
        except _UNREADABLE as error:
            raise self._no_message(where, str(error)) from error

    def _version(self, frame: bytes) -> int | None:
        """Of a message that has one."""
        try:
            return self._versioned.decode(frame).version
        except _UNREADABLE:
            return None

    def _no_message(self, where: str, why: str) -> KVFerryError:
        return KVFerryError(
            f"a frame came that is no message of {self._dialect.of}",
            kind=ErrorKind.PROTOCOL,
            where=where,
            why=why,
            remedy="see that nothing else uses this address",
        )
