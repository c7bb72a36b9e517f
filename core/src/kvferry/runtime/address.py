"""Where the scheduler and the workers of one engine meet.

Workers are built before the scheduler and neither waits for the other, so both derive the same
folder from the engine id. The folder is private to the user; the scheduler puts a fresh secret into
it, and a worker that cannot read the secret is not answered.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import stat
import time
from collections.abc import Mapping
from pathlib import Path

from kvferry.api import ErrorKind, KVFerryError, Retry

_SOCKET = "side.sock"
_TOKEN = "token"
_LOCK = "lock"
_CARD = "about.json"
_LOCK_ATTEMPTS = 10
_LOCK_PAUSE_SECONDS = 0.01
_UNIX_PATH_LIMIT = 107
"""Bytes of a socket path on Linux, without the terminating zero (unix(7))."""


class MeetingPlace:
    """Paths of one engine's meeting folder. Creating the object touches nothing.

    ``engine_id`` is the engine's own, already different for every data-parallel rank.
    """

    def __init__(self, engine_id: str, runtime_dir: str | None, environment: Mapping[str, str]) -> None:
        root = runtime_root(runtime_dir, environment)
        self.folder = root / hashlib.sha256(engine_id.encode()).hexdigest()[:24]
        self._lock: int | None = None
        if len(os.fsencode(self.folder / _SOCKET)) > _UNIX_PATH_LIMIT:
            raise KVFerryError(
                f"the runtime folder's path is too long for a socket: {self.folder}",
                kind=ErrorKind.CONFIG,
                where="runtime_dir",
                why=f"a Unix socket path has at most {_UNIX_PATH_LIMIT} bytes",
                remedy="set runtime_dir to a shorter path",
            )

    @property
    def endpoint(self) -> str:
        """ZeroMQ address of the side channel."""
        return f"ipc://{self.folder / _SOCKET}"

    @classmethod
    def at(cls, folder: Path) -> MeetingPlace:
        """The place whose folder is known already, for whoever looks around on this host."""
        place = cls.__new__(cls)
        place.folder = folder
        place._lock = None
        return place

    def claim(self, card: str = "") -> str:
        """Make the folder this process's own and return the fresh secret. Scheduler only. ``card`` is
        what it says about itself to whoever looks around.

        Raises :class:`KVFerryError` when another living engine with the same id holds it. A dead
        owner's folder is taken over.
        """
        _private_folder(self.folder.parent)
        while self._lock is None:
            _private_folder(self.folder)
            self._lock = self._try_lock()
        _sweep(self.folder.parent)
        token = secrets.token_hex(32)
        if card:
            self._write(_CARD, card)
        self._write(_TOKEN, token)
        return token

    def _write(self, name: str, text: str) -> None:
        temporary = self.folder / f".{name}.{os.getpid()}"
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        temporary.replace(self.folder / name)

    def _try_lock(self) -> int | None:
        """Descriptor of the held lock, or None when its file was just removed by a leaving owner."""
        for attempt in range(_LOCK_ATTEMPTS):
            try:
                return _locked(self.folder / _LOCK, os.O_CREAT)
            except FileNotFoundError:
                return None
            except BlockingIOError as error:
                # Another engine's start may be looking whether this folder was left behind.
                if attempt == _LOCK_ATTEMPTS - 1:
                    raise self._taken(error) from error
                time.sleep(_LOCK_PAUSE_SECONDS)
        return None

    def _taken(self, error: OSError) -> KVFerryError:
        return KVFerryError(
            "another engine with the same engine id is running on this host",
            kind=ErrorKind.CONFIG,
            where=str(self.folder),
            why=str(error),
            remedy="give each engine its own kv_transfer_config engine_id, or stop the other one",
            retry=Retry.AFTER_CHANGE,
        )

    def read_token(self) -> str | None:
        """The secret, or None while the scheduler has not written it. Worker only."""
        try:
            return (self.folder / _TOKEN).read_text()
        except OSError:
            return None

    def read_card(self) -> str | None:
        """What the scheduler says about itself to whoever looks around, or None."""
        try:
            return (self.folder / _CARD).read_text()
        except (OSError, UnicodeDecodeError):
            return None

    def alive(self) -> bool:
        """Whether some process holds the place. Touches nothing."""
        try:
            lock = _locked(self.folder / _LOCK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if lock is not None:
            os.close(lock)
        return False

    def release(self) -> None:
        """Remove the folder and give up the claim. Idempotent."""
        if self._lock is None:
            return
        _remove(self.folder)
        os.close(self._lock)
        self._lock = None


def runtime_root(runtime_dir: str | None, environment: Mapping[str, str]) -> Path:
    """The folder below which all instances of this user have their meeting folders."""
    base = runtime_dir or environment.get("XDG_RUNTIME_DIR")
    return Path(base) / "kvferry" if base else Path(f"/tmp/kvferry-{os.getuid()}")


def meeting_places(root: Path) -> list[MeetingPlace]:
    """Every meeting folder below ``root`` that belongs to this user, in the order of their names."""
    try:
        folders = sorted(root.iterdir())
        private = root.lstat().st_uid == os.getuid()
    except OSError:
        return []
    return [MeetingPlace.at(folder) for folder in folders if private and folder.is_dir()]


def _remove(folder: Path) -> None:
    """Remove a meeting folder whose lock is held."""
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()


def _sweep(root: Path) -> None:
    """Remove what engines left behind that were killed. A folder without a lock is being made."""
    for folder in root.iterdir():
        try:
            lock = _locked(folder / _LOCK)
        except OSError:
            continue
        if lock is not None:
            _remove(folder)
            os.close(lock)


def _locked(path: Path, flags: int = 0) -> int | None:
    """Descriptor of the file, locked; None when it is no longer the file at ``path``, so that the lock
    says nothing about the folder. Raises ``OSError``; ``BlockingIOError`` when somebody has it."""
    lock = os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if path.stat().st_ino == os.fstat(lock).st_ino:
            return lock
    except FileNotFoundError:
        pass
    except OSError:
        os.close(lock)
        raise
    os.close(lock)
    return None


def _private_folder(path: Path) -> None:
    """Create ``path`` for this user alone, or check that it is so already."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.lstat()
    except OSError as error:
        raise KVFerryError(
            f"cannot create the runtime folder {path}",
            kind=ErrorKind.IO,
            where="runtime_dir",
            why=str(error),
            remedy="set runtime_dir to a folder that this user may write",
        ) from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise KVFerryError(
            f"the runtime folder {path} is not private to this user",
            kind=ErrorKind.CONFIG,
            where="runtime_dir",
            why=f"owner {status.st_uid}, mode {stat.filemode(status.st_mode)}",
            remedy=f"remove it, or chmod 700 {path}, or set runtime_dir to another folder",
        )
