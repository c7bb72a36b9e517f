"""The one place where code that kvferry did not write may fail in any way it likes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from attrs import frozen

T = TypeVar("T")


@frozen
class Returned(Generic[T]):
    """The call came back with ``value``."""

    value: T


@frozen
class Raised:
    """The call ended with ``error``."""

    error: BaseException

    def __str__(self) -> str:
        """``TypeName: text`` on one line, which is what a row of a report has room for."""
        text = " ".join(str(self.error).split())
        name = type(self.error).__name__
        return f"{name}: {text}" if text else name


def call_foreign(function: Callable[[], T]) -> Returned[T] | Raised:
    """Call ``function`` and turn whatever it raises into a value.

    Only ``KeyboardInterrupt`` passes: it belongs to the user, not to the code that was called.
    """
    try:
        return Returned(function())
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001
        # A plugin may end in anything, SystemExit and exceptions that derive from BaseException
        # included. One broken plugin must become one row with a reason and never end the process,
        # so this is the only place in kvferry that catches everything.
        return Raised(error)
