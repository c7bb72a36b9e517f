"""Which workers of an engine are there, and how much of their memory is ready."""

from __future__ import annotations

from attrs import define

from kvferry.data.wire import FromWorker, Hello
from kvferry.runtime.side_channel import LOST_AFTER_SECONDS


@define
class _Worker:
    epoch: int
    ready_slots: int = 0
    heard: float = 0.0
    silent: bool = False
    gone: bool = False


class WorkerRoster:
    """The ranks 0 to ``world_size`` - 1, as far as they introduced themselves. Not thread-safe."""

    def __init__(self, world_size: int, fingerprint: str) -> None:
        self._world_size = world_size
        self._fingerprint = fingerprint
        self._workers: dict[int, _Worker] = {}

    @property
    def complete(self) -> bool:
        """Every rank is here, and none is silent or gone."""
        return len(self._workers) == self._world_size and not any(
            worker.silent or worker.gone for worker in self._workers.values()
        )

    @property
    def all_gone(self) -> bool:
        """Every rank said good-bye, so nobody touches any slot any more."""
        return len(self._workers) == self._world_size and all(
            worker.gone for worker in self._workers.values()
        )

    @property
    def ready_slots(self) -> int:
        """Slots that every rank has; 0 until all are here."""
        if len(self._workers) < self._world_size:
            return 0
        return min(worker.ready_slots for worker in self._workers.values())

    def greet(self, hello: Hello, now: float) -> str | None:
        """Why the worker is refused, or None."""
        if hello.world_size != self._world_size or not 0 <= hello.rank < self._world_size:
            return f"rank {hello.rank} of {hello.world_size}, the scheduler has {self._world_size}"
        if hello.fingerprint != self._fingerprint:
            return "the worker runs with another configuration or other plugin versions"
        known = self._workers.setdefault(hello.rank, _Worker(epoch=hello.epoch, heard=now))
        if known.epoch != hello.epoch:
            return "a worker of this rank was here before: restart the engine"
        return None

    def heard(self, message: FromWorker, now: float) -> bool:
        """Note a sign of life. False for a worker that is not, or no longer, the one of its rank."""
        worker = self._workers.get(message.rank)
        if worker is None or worker.epoch != message.epoch:
            return False
        worker.heard = now
        worker.silent = False
        return True

    def ready(self, rank: int, slots: int) -> None:
        self._workers[rank].ready_slots = slots

    def leave(self, rank: int) -> None:
        self._workers[rank].gone = True

    def newly_silent(self, now: float) -> list[int]:
        """Ranks that were silent for too long, each told once until it is heard again."""
        silent = [
            rank
            for rank, worker in self._workers.items()
            if not worker.silent and not worker.gone and now - worker.heard > LOST_AFTER_SECONDS
        ]
        for rank in silent:
            self._workers[rank].silent = True
        return silent
