"""What fails in this channel, told with its kind and remedy."""

from __future__ import annotations

import errno
import os

from kvferry.api import ErrorKind, ItemResult, KVFerryError, Retry, TransferStatus
from kvferry_transport_tcp.wire import PieceStatus, Refusal

DONE = ItemResult(TransferStatus.DONE)

_REFUSALS = {
    Refusal.VERSION: (
        ErrorKind.COMPATIBILITY,
        "it speaks another version of the wire protocol",
        "let both sides run the same release",
    ),
    Refusal.EPOCH: (
        ErrorKind.PROTOCOL,
        "it has been started anew since it exported this",
        "get a new export of it",
    ),
    Refusal.NO_SECRET_HERE: (
        ErrorKind.COMPATIBILITY,
        "it has a shared secret, and none is set here",
        "set secret_variable on both sides, and the same secret",
    ),
    Refusal.NO_SECRET_THERE: (
        ErrorKind.COMPATIBILITY,
        "a shared secret is set here, and it has none",
        "set secret_variable on both sides, and the same secret",
    ),
    Refusal.WRONG_SECRET: (
        ErrorKind.COMPATIBILITY,
        "its secret is another one",
        "set the same secret on both sides",
    ),
    Refusal.BUSY: (ErrorKind.IO, "it has too many connections already", "try again later"),
    Refusal.UNKNOWN_CONNECTION: (
        ErrorKind.IO,
        "it has given the connection up",
        "connect to it again",
    ),
}


def refused(reason: Refusal, peer: str) -> KVFerryError:
    """The peer does not let us connect, or we do not want to."""
    kind, why, remedy = _REFUSALS[reason]
    return KVFerryError(
        "the peer cannot be connected to",
        kind=kind,
        where=peer,
        why=why,
        remedy=remedy,
        retry=Retry.LATER if kind is ErrorKind.IO else Retry.AFTER_CHANGE,
    )


def system_fault(error: OSError, what: str, where: str, remedy: str) -> KVFerryError:
    """``error`` as an error of ours."""
    told = KVFerryError(
        what, kind=ErrorKind.IO, where=where, why=error_text(error), remedy=remedy, retry=Retry.LATER
    )
    told.__cause__ = error
    return told


def error_text(error: OSError) -> str:
    """``ECONNREFUSED (Connection refused)``, or the text of an error without a number."""
    if error.errno is None or error.errno not in errno.errorcode:
        return str(error)
    return f"{errno.errorcode[error.errno]} ({os.strerror(error.errno)})"


def lost(peer: str, why: str) -> KVFerryError:
    return KVFerryError(
        "the connection to the peer is lost",
        kind=ErrorKind.IO,
        where=peer,
        why=why,
        remedy="connect to it again if it is there",
        retry=Retry.LATER,
    )


def garbled(peer: str, why: str) -> KVFerryError:
    return KVFerryError(
        "the peer sent what the wire protocol does not allow",
        kind=ErrorKind.PROTOCOL,
        where=peer,
        why=why,
        remedy="let both sides run the same release",
    )


def late(peer: str) -> KVFerryError:
    return KVFerryError(
        "the operation was not done by its deadline",
        kind=ErrorKind.TIMEOUT,
        where=peer,
        remedy="look whether the peer and the network between are well, or allow more time",
        retry=Retry.LATER,
    )


def cancelled(peer: str) -> KVFerryError:
    return KVFerryError("the operation was cancelled", kind=ErrorKind.CANCELLED, where=peer)


def closed(what: str) -> KVFerryError:
    return KVFerryError(f"the {what} is closed", kind=ErrorKind.CLOSED, remedy="open another one")


def outside(peer: str, why: str) -> KVFerryError:
    return KVFerryError(
        "an operation lies outside of registered memory",
        kind=ErrorKind.PROTOCOL,
        where=peer,
        why=why,
        remedy="name registered regions, and bytes within them",
    )


def of_status(status: PieceStatus, peer: str) -> KVFerryError:
    """What an owner that did not do a piece means."""
    if status is PieceStatus.LATE:
        return late(peer)
    return outside(peer, "the peer has no such region, or it is shorter")


def failed(error: KVFerryError) -> ItemResult[TransferStatus]:
    return ItemResult(TransferStatus.FAILED, error)
