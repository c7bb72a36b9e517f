"""What operations and connections of the channel fail with."""

from __future__ import annotations

import errno
import logging
import os

from kvferry.api import ErrorKind, KVFerryError, Retry

_log = logging.getLogger(__name__)

USE_TCP = "use the channel tcp, or give the peer memory with a memory file"


def errno_text(number: int) -> str:
    """``EPERM (Operation not permitted)``."""
    return f"{errno.errorcode.get(number, f'errno {number}')} ({os.strerror(number)})"


def outside(what: str, where: str, why: str) -> KVFerryError:
    return KVFerryError(
        f"the operation leaves {what}",
        kind=ErrorKind.PROTOCOL,
        where=where,
        why=why,
        remedy="name spans inside of registered regions",
    )


def taken_back(name: str, where: str) -> KVFerryError:
    return KVFerryError(
        f"the region {name!r} was taken back",
        kind=ErrorKind.PROTOCOL,
        where=where,
        remedy="ask the peer again what it has",
        retry=Retry.LATER,
    )


def gone(where: str, why: str) -> KVFerryError:
    return KVFerryError(
        "the peer is gone",
        kind=ErrorKind.IO,
        where=where,
        why=why,
        remedy="connect to its successor, if there is one",
        retry=Retry.LATER,
    )


def overdue(where: str) -> KVFerryError:
    return KVFerryError(
        "the operation was not done by its deadline",
        kind=ErrorKind.TIMEOUT,
        where=where,
        remedy="give it more time, or move less at once",
        retry=Retry.LATER,
    )


def cancelled(where: str) -> KVFerryError:
    return KVFerryError("the batch was cancelled", kind=ErrorKind.CANCELLED, where=where)


def closed(what: str, where: str) -> KVFerryError:
    return KVFerryError(f"the {what} is closed", kind=ErrorKind.CLOSED, where=where)


def unreadable(name: str, where: str, why: str) -> KVFerryError:
    return KVFerryError(
        f"the memory of the region {name!r} cannot be reached from another process",
        kind=ErrorKind.UNSUPPORTED,
        where=where,
        why=why,
        remedy=USE_TCP,
        retry=Retry.AFTER_CHANGE,
    )


def unmoved(name: str, where: str, number: int) -> KVFerryError:
    """The system did not copy; ``number`` is its errno."""
    kind, remedy = ErrorKind.IO, "look whether the peer still has that memory"
    if number in (errno.EPERM, errno.EACCES, errno.ENOSYS):
        kind, remedy = ErrorKind.UNSUPPORTED, USE_TCP
    return KVFerryError(
        f"the system did not copy from the region {name!r}",
        kind=kind,
        where=where,
        why=errno_text(number),
        remedy=remedy,
        retry=Retry.LATER if kind is ErrorKind.IO else Retry.AFTER_CHANGE,
    )


def defect(error: Exception, doing: str, where: str) -> KVFerryError:
    """What a fault of ours is told as; the log has its place."""
    if isinstance(error, KVFerryError):
        return error
    _log.error("kvferry: the local channel failed while %s", doing, exc_info=error)
    told = KVFerryError(
        f"the channel failed while {doing}",
        kind=ErrorKind.INTERNAL,
        where=where,
        why=repr(error),
        remedy="report it to the authors of kvferry",
    )
    told.__cause__ = error
    return told
