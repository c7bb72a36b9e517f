"""Other projects' packages in environments of their own, for comparisons in the same run."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from tests.engines import REPOSITORY

CACHE = REPOSITORY / ".demo" / "packages"
"""Where environments are kept unless the command says another place."""
INSTALL_SECONDS = 600.0
_READY = "ready"


class PackageMissing(Exception):
    """Why there is nothing to compare with."""


def make_environment(folder: Path, installs: Sequence[Sequence[str]], check: str) -> Path:
    """An environment with what ``installs`` are the arguments of pip for, that sees everything this one has,
    pip too; its interpreter. ``check`` is a program that has to run in it.

    Raises :class:`PackageMissing`.
    """
    python = folder / "bin" / "python"
    _run(sys.executable, "-m", "venv", "--without-pip", str(folder))
    packages = next(folder.glob("lib/python*/site-packages"))
    (packages / "outer.pth").write_text(sysconfig.get_path("purelib") + "\n")
    for arguments in installs:
        _run(str(python), "-m", "pip", "install", "-q", *arguments)
    _run(str(python), "-c", check)
    return python


def kept_environment(folder: Path, name: str, installs: Sequence[Sequence[str]], check: str) -> Path:
    """The same, made once below ``folder`` and found there again by the next run."""
    described = hashlib.sha256(repr((sys.executable, installs, check)).encode()).hexdigest()[:8]
    place = folder.absolute() / f"{name}-{described}"
    if not (place / _READY).exists():
        shutil.rmtree(place, ignore_errors=True)  # somebody was interrupted here
        make_environment(place, installs, check)
        (place / _READY).touch()
    return place / "bin" / "python"


def packages_of(python: Path) -> Path:
    """Where an environment's own packages lie."""
    return next(python.parent.parent.glob("lib/python*/site-packages"))


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=INSTALL_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PackageMissing(f"{' '.join(command)}: {error}") from error
    if done.returncode != 0:
        last = (done.stderr.strip() or "it failed").splitlines()[-1]
        raise PackageMissing(f"{' '.join(command[1:])}: {last}")
