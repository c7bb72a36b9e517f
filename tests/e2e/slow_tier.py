"""A keyed tier whose reads take as long as a file says, which the test may change at any time."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from attrs import frozen

from kvferry.api import ChunkKey, ReadStatus
from kvferry.testing.fake_distributions import fake_distribution
from kvferry.testing.keyed_backends import DictionaryBackend, DictionaryOptions


@frozen(kw_only=True)
class SlowOptions:
    """``wait`` is a file with the seconds that one chunk takes."""

    wait: str


class SlowBackend(DictionaryBackend):
    """One chunk after the other, each after its wait."""

    def __init__(self, options: SlowOptions, capacity: int) -> None:
        super().__init__(DictionaryOptions(), capacity)
        self._wait = Path(options.wait)

    def read_one(self, key: ChunkKey, into: memoryview) -> ReadStatus:
        time.sleep(float(self._wait.read_text()))
        return super().read_one(key, into)


class SlowTier:
    """Describes the tier for a configuration, and sets its wait."""

    def __init__(self, folder: Path) -> None:
        self._wait = folder / "wait"
        self._distribution = folder / "site"
        self._wait.write_text("0")
        fake_distribution(
            self._distribution, "acme-slow", entry_points={"acme_slow": "tests.e2e.slow_plugin"}, source={}
        )

    def config(self, keys: str) -> dict[str, object]:
        """Arguments of :func:`tests.engines.write_config`."""
        return {
            "plugins": ["acme_slow"],
            "lower": {"slow": f"use: slow, wait: {self._wait}, capacity: 1GiB, {keys}"},
        }

    @property
    def environment(self) -> dict[str, str]:
        return {"PYTHONPATH": str(self._distribution)}

    @contextlib.contextmanager
    def seconds_per_chunk(self, seconds: float) -> Iterator[None]:
        # Replaced as a whole: the backend may be reading it.
        self._set(seconds)
        try:
            yield
        finally:
            self._set(0)

    def _set(self, seconds: float) -> None:
        new = self._wait.with_name("wait.new")
        new.write_text(str(seconds))
        new.replace(self._wait)
