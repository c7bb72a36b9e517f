"""One process at a time for the stores of a rank."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time

from kvferry.api import ErrorKind, KVFerryError, Retry
from kvferry_backend_ssd.names import OWNER_FILE

OWNER_BYTES = 4096
"""What the file counts for in the capacity. Its text is shorter."""
_PAUSE_SECONDS = 0.05
_TEXT_BYTES = 1024


class Owner:
    """A lock that the system takes away with the process, so that a dead owner holds nothing.

    The file's text is for messages alone.
    """

    def __init__(self, folder: str, instance: str, rank: int) -> None:
        self._path = os.path.join(folder, OWNER_FILE)
        self._text = f"process {os.getpid()} on {socket.gethostname()}, instance {instance!r}, rank {rank}"
        self._fd = -1

    def take(self, seconds: float) -> None:
        """Become the owner, after waiting at most so long for one that may be dying.

        Raises :class:`KVFerryError` (``IO``) when another lives on, and ``OSError`` when the file cannot
        be used. An owner in this very process is not waited for.
        """
        told = ""
        for _ in range(1 + int(seconds / _PAUSE_SECONDS)):
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                told = self._told()
                self.give_back()
                if told == self._text:
                    break
                time.sleep(_PAUSE_SECONDS)
                continue
            if self._is_in_place():
                self._sign()
                return
            self.give_back()  # somebody removed the file that was just locked
        raise KVFerryError(
            "another backend uses this folder for the same instance and rank",
            kind=ErrorKind.IO,
            where=self._path,
            why=f"it is held by {told or 'a process that left no name'}",
            remedy="end that process, or give this engine another path or a name of its own (key  instance)",
            retry=Retry.LATER,
        )

    def give_back(self) -> None:
        """Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _sign(self) -> None:
        """A disk that is full must not keep us from what it holds."""
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, self._text.encode("utf-8", "backslashreplace")[:_TEXT_BYTES], 0)

    def _told(self) -> str:
        with contextlib.suppress(OSError):
            return os.pread(self._fd, _TEXT_BYTES, 0).decode("utf-8", "replace").strip()
        return ""

    def _is_in_place(self) -> bool:
        with contextlib.suppress(OSError):
            return os.stat(self._path).st_ino == os.fstat(self._fd).st_ino
        return False
