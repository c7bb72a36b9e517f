"""The folder of one rank: its owner, and the store files of other shards that still lie there."""

from __future__ import annotations

import contextlib
import errno
import logging
import os

from kvferry.api import BackendContext, ErrorKind, KVFerryError, Retry
from kvferry_backend_ssd.faults import errno_text, fault
from kvferry_backend_ssd.names import is_store_file, set_folder
from kvferry_backend_ssd.owner import Owner

_log = logging.getLogger(__name__)

WHAT = "the folder of the tier cannot be used"


class SetFolder:
    """Everything that one rank of one instance keeps below the tier's path. Threads: one at a time."""

    def __init__(self, root: str, context: BackendContext) -> None:
        self.path = os.path.join(root, set_folder(context.instance, context.rank))
        self._root = root
        self._owner = Owner(self.path, context.instance, context.rank)
        self._others: list[tuple[str, int]] = []
        """Path and length of store files that are not ours, the one that was written longest ago first."""

    def open(self, own: str, patience: float) -> None:
        """Make the folder and become its owner. ``own`` is the name of our store file.

        Raises :class:`KVFerryError`. The tier's path may be missing, its parent must not be: a disk that
        is not mounted should not be mistaken for an empty one.
        """
        try:
            self._make()
            self._owner.take(patience)
        except OSError as error:
            raise fault(error, WHAT, str(error.filename or self.path)) from error
        try:
            names = [name for name in os.listdir(self.path) if is_store_file(name) and name != own]
            found = [(os.stat(os.path.join(self.path, name)), name) for name in names]
        except OSError as error:
            self.close()
            raise fault(error, WHAT, self.path) from error
        found.sort(key=lambda each: each[0].st_mtime)
        self._others = [(os.path.join(self.path, name), stat.st_size) for stat, name in found]

    @property
    def others_bytes(self) -> int:
        """What store files of other shards and slot sizes take."""
        return sum(size for _, size in self._others)

    def make_room(self, length: int) -> None:
        """Remove such files until at most ``length`` bytes of them are left."""
        while self._others and self.others_bytes > length:
            path, size = self._others.pop(0)
            _log.info(
                "kvferry: removing %s (%d bytes), the store of another layout, to make room", path, size
            )
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    def sync(self) -> None:
        """The names in it, and its own, are durable when this returns."""
        _sync(self.path)
        _sync(self._root)
        with contextlib.suppress(PermissionError):  # what lies above need not be ours to read
            _sync(os.path.dirname(os.path.abspath(self._root)))

    def close(self) -> None:
        self._owner.give_back()

    def _make(self) -> None:
        try:
            _make_folder(self._root)
        except FileNotFoundError as error:
            raise KVFerryError(
                WHAT,
                kind=ErrorKind.IO,
                where=self._root,
                why=f"{errno_text(errno.ENOENT)}: the folder above it is missing, and is not made",
                remedy="mount its disk if that is missing, else make the folder above it",
                retry=Retry.LATER,
            ) from error
        _make_folder(self.path)


def _make_folder(path: str) -> None:
    try:
        os.mkdir(path)
    except FileExistsError:
        if not os.path.isdir(path):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path) from None


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
