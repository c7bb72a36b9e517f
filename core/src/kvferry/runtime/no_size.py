"""The error of everything that is asked for sizes and has none."""

from __future__ import annotations

from kvferry.api import ErrorKind, KVFerryError, Retry


def no_size(what: str, where: str, why: str, remedy: str) -> KVFerryError:
    """An error that a user mends by a better file or a better option."""
    return KVFerryError(
        what, kind=ErrorKind.CONFIG, where=where, why=why, remedy=remedy, retry=Retry.AFTER_CHANGE
    )


def brief(found: object) -> str:
    """A value as it reads in a sentence, however long it is."""
    text = repr(found)
    return text if len(text) <= 60 else f"{text[:57]}..."
