"""Which of the two I/O paths a tier uses."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from kvferry.api import ErrorKind, KVFerryError, Retry
from kvferry_backend_ssd.block_io import BlockIOFactory
from kvferry_backend_ssd.options import IOPath
from kvferry_backend_ssd.refusal import uring_refusal
from kvferry_backend_ssd.threads_io import ThreadsIO
from kvferry_backend_ssd.uring_io import UringIO


def choose_io(
    wanted: IOPath, tier: str, ask: Callable[[], str] = uring_refusal
) -> tuple[IOPath, BlockIOFactory]:
    """The path and the factory of its objects. ``ask`` gives the reason against io_uring, or nothing.

    Raises :class:`KVFerryError` (``UNSUPPORTED``) when ``io_uring`` is demanded and refused.
    """
    refusal = "" if wanted is IOPath.THREADS else ask()
    if wanted is not IOPath.THREADS and not refusal:
        return IOPath.IO_URING, UringIO
    if wanted is IOPath.IO_URING:
        raise KVFerryError(
            "io: io_uring is asked for, and cannot be used here",
            kind=ErrorKind.UNSUPPORTED,
            where=f"tier {tier}",
            why=refusal,
            remedy="install kvferry-native and let the kernel give us io_uring, or set  io: auto",
            retry=Retry.AFTER_CHANGE,
        )
    return IOPath.THREADS, partial(ThreadsIO, name=f"kvferry-{tier}")
