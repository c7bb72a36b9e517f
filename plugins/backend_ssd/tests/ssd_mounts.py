"""File systems of a test's own, in a child whose mounts nobody else sees and which end with it."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from plugins.backend_ssd.tests.ssd_children import child

_NEW_MOUNTS, _NEW_USER = 0x00020000, 0x10000000
MIB = 1 << 20


class NotPermitted(Exception):
    """This machine does not let us do it; the test is skipped with the reason."""


def with_mounts(work: Callable[[], None]) -> None:
    """Run ``work`` in a child that may mount. Skips where the system does not let us."""

    def run(say: Callable[[str], None], _wait: Callable[[], None]) -> None:
        try:
            _enter()
            work()
        except NotPermitted as error:
            say(f"skip: {error}")
            return
        say("fine")

    with child(run) as process:
        said = []
        while line := process.line():
            said.append(line)
    if said and said[-1].startswith("skip: "):
        pytest.skip(said[-1].removeprefix("skip: "))
    assert said == ["fine"], "\n".join(said)


def mount_memory(where: Path, mib: int) -> None:
    """A tmpfs of so many MiB."""
    where.mkdir(exist_ok=True)
    command("mount", "-t", "tmpfs", "-o", f"size={mib}m", "test", str(where))


def mount_ext4(where: Path, mib: int) -> Path:
    """A real file system of so many MiB in a file, which becomes read-only after an error of its own. The
    file that makes it have one."""
    where.mkdir(exist_ok=True)
    disk = where.with_suffix(".disk")
    with open(disk, "wb") as file:
        file.truncate(mib * MIB)
    command("mkfs.ext4", "-q", "-O", "^has_journal", "-m", "0", str(disk))
    command("mount", "-o", "loop,errors=remount-ro", str(disk), str(where))
    device = os.stat(where).st_dev
    name = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve().name
    return Path(f"/sys/fs/ext4/{name}/trigger_fs_error")


def command(*words: str) -> None:
    if shutil.which(words[0]) is None:
        raise NotPermitted(f"{words[0]} is not installed")
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotPermitted(f"{' '.join(words)}: {done.stderr.strip()}")


def _enter() -> None:
    """Mounts of our own; as root, or as root of a user's own world."""
    library = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    if library.unshare(_NEW_MOUNTS | (0 if user == 0 else _NEW_USER)):
        raise NotPermitted(f"mounts of one's own are not permitted: {os.strerror(ctypes.get_errno())}")
    if user:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    command("mount", "--make-rprivate", "/")
