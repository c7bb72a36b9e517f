"""Runs simulations of many seeds, and says how to repeat the one that failed."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Protocol

from attrs import define, field, frozen

from kvferry.config import StoreWhen
from kvferry.runtime.requests import LoadMode
from tests.simulation.coverage import Coverage, lines
from tests.simulation.events import EventLoop, SimulationFailure
from tests.simulation.tiers import TierSize
from tests.simulation.world import Settings, World

EVENTS_PER_SEED = 25_000
"""A run of more events goes on with the next seed: many short histories see more than a long one."""


@frozen(kw_only=True)
class Failure:
    """A seed that failed, after how many events, and what must not have happened."""

    seed: int
    events: int
    check: str
    what: str
    last: tuple[str, ...]
    target: str = "simulate"

    @property
    def command(self) -> str:
        return f"make {self.target} SEED={self.seed} EVENTS={self.events}"

    def __str__(self) -> str:
        shown = "\n".join(f"  {line}" for line in self.last)
        return (
            f"The last events of seed {self.seed}:\n{shown}\n"
            f"{self.what}\n"
            f"Broken after {self.events:,} events: {self.check}\n"
            f"Repeat it with: {self.command}"
        )


class AnyWorld(Protocol):
    """Whatever events happen to. ``target`` is what ``make`` calls it."""

    target: str
    loop: EventLoop
    coverage: Coverage

    def run(self, events: int) -> None:
        """Let so many events happen. Raises :class:`SimulationFailure` at the first that must not."""
        ...

    def drain(self) -> None:
        """Let everything come to its end."""
        ...


@define
class Report:
    """What happened in all seeds together. ``digests`` are those of the histories, by seed."""

    events: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    virtual_seconds: float = 0.0
    kinds: Counter[str] = field(factory=Counter)
    faults: Counter[str] = field(factory=Counter)
    coverage: Coverage = field(factory=Coverage)
    digests: dict[int, str] = field(factory=dict)
    failure: Failure | None = None

    @property
    def rate(self) -> float:
        """Events per second of processor time, so that others on the machine do not matter."""
        return self.events / self.cpu_seconds if self.cpu_seconds else 0.0

    @property
    def share_of_faults(self) -> float:
        return sum(self.faults.values()) / max(1, self.events)

    def add(self, world: AnyWorld) -> None:
        self.events += world.loop.count
        self.virtual_seconds += world.loop.now
        self.kinds += world.loop.kinds
        self.faults += world.loop.faults
        self.coverage.add(world.coverage)

    def text(self) -> str:
        """For people."""
        return (
            f"{lines(self.coverage.rows())}\n"
            f"{lines(('fault', name, count) for name, count in sorted(self.faults.items()))}\n"
            f"{self.summary()}"
        )

    def summary(self) -> str:
        return (
            f"{self.events:,} events of {len(self.digests)} seeds, {self.share_of_faults:.1%} faults, "
            f"{self.virtual_seconds:,.0f} virtual seconds; {self.seconds:.1f} s, of the processor "
            f"{self.cpu_seconds:.1f} s: {self.rate:,.0f} events/s"
        )


def settings_of(seed: int) -> Settings:
    """Each seed has a world of its own size."""
    random = Random(seed)
    tiers = tuple(_tier_of(random) for _ in range(random.choice((0, 1, 1, 1, 1, 2))))
    return Settings(
        ranks=random.choice((1, 2, 2, 3)),
        slots=random.choice((24, 24, 36) if tiers else (24, 36, 48, 64)),
        load_mode=random.choice((LoadMode.AUTO, LoadMode.ASYNC, LoadMode.SYNC)),
        save_generated=random.random() < 0.7,
        quotas=seed % 3 == 1,
        tiers=tiers,
    )


def _tier_of(random: Random) -> TierSize:
    """Some hold more than their index thinks, some less."""
    chunks = random.choice((30, 60, 90))
    return TierSize(
        when=random.choice((StoreWhen.WRITE_THROUGH, StoreWhen.WRITE_THROUGH, StoreWhen.WRITE_ON_EVICT)),
        chunks=chunks,
        room=chunks + random.choice((-12, 0, 6)),
        in_flight=random.choice((3, 8, 20)),
    )


MakeWorld = Callable[[int, Settings], AnyWorld]


def run_seed(seed: int, events: int, report: Report, make_world: MakeWorld = World) -> None:
    """Let ``events`` happen and then all come to its end; notes the failure in ``report``."""
    world = make_world(seed, settings_of(seed))
    started, cpu_started = time.monotonic(), time.process_time()
    draining = False
    with _errors_are_failures():
        try:
            world.run(events)
            draining = True
            world.drain()
        except Exception as error:  # noqa: BLE001 - whatever breaks must be told with its seed
            check = error.check if isinstance(error, SimulationFailure) else type(error).__name__
            count = events if draining else world.loop.count
            report.failure = Failure(
                seed=seed,
                events=count,
                check=check,
                what=str(error),
                last=tuple(world.loop.last),
                target=world.target,
            )
    report.seconds += time.monotonic() - started
    report.cpu_seconds += time.process_time() - cpu_started
    report.add(world)
    report.digests[seed] = world.loop.digest


def run(
    seed: int,
    events: int,
    *,
    progress: Callable[[Report], object] = lambda report: None,
    make_world: MakeWorld = World,
    per_seed: int = EVENTS_PER_SEED,
) -> Report:
    """Run seeds from ``seed`` on until so many events have happened or one has failed."""
    report = Report()
    left = events
    while left > 0 and report.failure is None:
        part = min(left, per_seed)
        run_seed(seed, part, report, make_world)
        left -= part
        seed += 1
        progress(report)
    return report


def shorter(failure: Failure, make_world: MakeWorld = World) -> Failure:
    """The same failure after fewer events, where halving finds one.

    A failure in the middle of a run has its smallest count already; one that only shows when all should
    have ended may have begun long before.
    """
    best = failure
    count = failure.events // 2
    while count >= 100:
        report = Report()
        run_seed(failure.seed, count, report, make_world)
        if report.failure is None or report.failure.check != failure.check:
            break
        best = report.failure
        count = best.events // 2
    return best


class _ErrorHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        raise SimulationFailure("the product logs no error", record.getMessage())


@contextmanager
def _errors_are_failures() -> Iterator[None]:
    """Warnings about faults are expected by the thousand; an error is the product's own surprise."""
    logger, handler = logging.getLogger("kvferry"), _ErrorHandler(logging.ERROR)
    level = logger.level
    logger.setLevel(logging.ERROR)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
