"""Errors that say what happened, where, why, what to do, and whether to try again."""

from __future__ import annotations

import enum
from collections.abc import Sequence


class ErrorKind(enum.Enum):
    """What sort of thing went wrong. Closed: callers may match on it exhaustively."""

    CONFIG = "config"
    PLUGIN = "plugin"
    COMPATIBILITY = "compatibility"
    CAPACITY = "capacity"
    IO = "io"
    INTEGRITY = "integrity"
    TIMEOUT = "timeout"
    PROTOCOL = "protocol"
    CANCELLED = "cancelled"
    CLOSED = "closed"
    UNSUPPORTED = "unsupported"
    INTERNAL = "internal"


class Retry(enum.Enum):
    """Whether the same call may succeed later."""

    NEVER = "never"
    LATER = "later"
    AFTER_CHANGE = "after-change"
    """Only after someone changed the configuration or the machine."""


class KVFerryError(Exception):
    """One fault, told in full.

    ``what`` is one sentence without a trailing full stop; ``where`` a place such as
    ``config.yaml:9:11``, a plugin or a peer; ``why`` the cause; ``remedy`` what the reader can do.
    """

    def __init__(
        self,
        what: str,
        *,
        kind: ErrorKind,
        where: str = "",
        why: str = "",
        remedy: str = "",
        retry: Retry = Retry.NEVER,
    ) -> None:
        super().__init__(what)
        self.what = what
        self.kind = kind
        self.where = where
        self.why = why
        self.remedy = remedy
        self.retry = retry

    def __str__(self) -> str:
        head = f"{self.where}: {self.what}" if self.where else self.what
        lines = [head]
        if self.why:
            lines.append(f"  why  {self.why}")
        if self.remedy:
            lines.append(f"  fix  {self.remedy}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions with keyword-only arguments do not survive pickling by default, and engines
        # carry start-up errors from worker processes to their parent that way.
        return (_rebuild, (self.what, self.kind, self.where, self.why, self.remedy, self.retry))


def _rebuild(what: str, kind: ErrorKind, where: str, why: str, remedy: str, retry: Retry) -> KVFerryError:
    return KVFerryError(what, kind=kind, where=where, why=why, remedy=remedy, retry=retry)


class KVFerryErrors(KVFerryError):
    """Several faults found in one run, reported together.

    ``errors`` holds them in the order in which a reader should mend them.
    """

    def __init__(self, what: str, errors: Sequence[KVFerryError], *, kind: ErrorKind) -> None:
        super().__init__(what, kind=kind)
        self.errors = tuple(errors)

    def __str__(self) -> str:
        return "\n".join([self.what, *(str(error) for error in self.errors)])

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild_many, (self.what, self.errors, self.kind))


def _rebuild_many(what: str, errors: tuple[KVFerryError, ...], kind: ErrorKind) -> KVFerryErrors:
    return KVFerryErrors(what, errors, kind=kind)
