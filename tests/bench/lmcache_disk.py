"""LMCache in a throw-away environment, for a comparison in the same run."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.bench import environments

LMCACHE = "lmcache==0.5.6"
NEEDS = (
    "aiofile",
    "aiofiles",
    "awscrt",
    "nvtx",
    "opentelemetry-exporter-prometheus",
    "redis",
    "sortedcontainers",
)
"""What its storage layer imports beside what vLLM brings. Its own list wants other versions of much that is
here, and CUDA; so it is installed without that list."""
PROGRAM = Path(__file__).with_name("lmcache_program.py")


class LMCacheMissing(Exception):
    """Why there is nothing to compare with."""


def make_environment(folder: Path) -> Path:
    """An environment with LMCache that sees everything this one has, pip too; its interpreter.

    Raises :class:`LMCacheMissing`.
    """
    installs = [["--no-deps", LMCACHE], list(NEEDS)]
    try:
        return environments.make_environment(
            folder, installs, "import lmcache.v1.storage_backend.storage_manager"
        )
    except environments.PackageMissing as missing:
        raise LMCacheMissing(str(missing)) from missing


class LMCacheDisk:
    """A process with LMCache's local disk backend in ``folder``. Batches are of ``at_once`` chunks."""

    def __init__(self, python: Path, folder: Path, chunk_bytes: int, at_once: int, *, direct: bool) -> None:
        mode = "direct" if direct else "buffered"
        self._command = [
            *(str(part) for part in (python, PROGRAM, folder, chunk_bytes, at_once)),
            mode,
        ]
        self.at_once = at_once

    def __enter__(self) -> Self:
        self._errors = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        if self._answer() != "ready":
            self.__exit__(None, None, None)
            raise LMCacheMissing(f"its local disk backend does not start: {self._complaint}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.seek(0)
        lines = self._errors.read().strip().splitlines()
        self._complaint = lines[-1] if lines else "no reason given"
        self._errors.close()

    def put(self, first: int) -> float:
        """Seconds until the chunks from ``first`` on are on the disk."""
        return self._ask("put", first)

    def get(self, first: int) -> float:
        return self._ask("get", first)

    def remove(self, first: int) -> None:
        self._ask("remove", first)

    def _ask(self, what: str, first: int) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{what} {first}\n")
        self._process.stdin.flush()
        answer = self._answer()
        if not answer:
            raise RuntimeError(f"LMCache ended during {what!r}")
        return float(answer)

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()
