"""Faults as data: which call of which operation meets what.

A plan is frozen, can be drawn from a seed, and prints itself as code. Whoever injects it asks a
:class:`FaultPlayer` before every call. :mod:`kvferry.testing.faulty_backend` injects above a backend,
:mod:`kvferry.testing.faulty_files` below one, :mod:`kvferry.testing.faulty_channel` above a channel.
"""

from __future__ import annotations

import contextlib
import enum
import errno as errno_names
import fnmatch
import os
import random
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NoReturn

import attrs
from attrs import field, frozen

from kvferry.api import ErrorKind, KVFerryError, Retry


class CrashBy(enum.Enum):
    """How a process dies in a test."""

    RAISING = "raising"
    """:class:`InjectedCrash` goes up through everything that does not catch ``BaseException``."""
    EXITING = "exiting"
    """``os._exit``: for a child process, which really ends."""


@frozen
class Fail:
    """The call fails: as an error of this kind where results have kinds, else as an ``OSError``."""

    kind: ErrorKind = ErrorKind.IO
    retry: Retry = Retry.LATER
    errno: int = errno_names.EIO


@frozen
class Delay:
    """The call takes so much longer, in seconds of the injector's clock."""

    seconds: float


@frozen
class Stall:
    """The call does not end until it is released."""


@frozen
class NoSpace:
    """The store is full for this call."""


@frozen
class TornWrite:
    """``keep`` bytes are written, then the call fails."""

    keep: int


@frozen
class ShortWrite:
    """``keep`` bytes are written, and the call says so, as an operating system may."""

    keep: int


@frozen
class FlipBit:
    """One bit of the bytes is turned over, counted from their start and wrapping around."""

    bit: int


@frozen
class LoseCompletion:
    """The work is done, and nobody hears of it."""


@frozen
class DoubleCompletion:
    """The work is told of twice."""


@frozen
class ReorderCompletion:
    """The work is told of after that of the next call."""


@frozen
class Drop:
    """The call reaches nobody, and ends when its deadline is over."""


@frozen
class LateWrite:
    """After the work was told of, its memory is written once more."""


@frozen
class Crash:
    """The process dies at the beginning of the call."""

    by: CrashBy = CrashBy.RAISING


Effect = (
    Fail
    | Delay
    | Stall
    | NoSpace
    | TornWrite
    | ShortWrite
    | FlipBit
    | LoseCompletion
    | DoubleCompletion
    | ReorderCompletion
    | Drop
    | LateWrite
    | Crash
)


class InjectedCrash(BaseException):
    """The process is taken for dead. Not an ``Exception``, so that no error handling survives it."""


@frozen
class Fault:
    """``effect`` meets the ``nth`` call of ``operation``, from 1, among those that it is about.

    It is about all calls, or about those whose subject (a file's path, a chunk's key) matches the
    shell pattern ``subject``. Without ``nth`` it meets every one of them.
    """

    operation: str
    effect: Effect
    nth: int | None = None
    subject: str = "*"

    def __attrs_post_init__(self) -> None:
        if self.nth is not None and self.nth < 1:
            raise ValueError(f"calls are counted from 1, not {self.nth}")


def _in_order(faults: Iterable[Fault]) -> tuple[Fault, ...]:
    return tuple(faults)


@frozen
class FaultPlan:
    """What goes wrong, and when. Nothing at all by default."""

    faults: tuple[Fault, ...] = field(default=(), converter=_in_order)

    @classmethod
    def drawn(
        cls,
        seed: int,
        operations: Sequence[str],
        effects: Sequence[Effect],
        *,
        faults: int,
        calls: int,
    ) -> FaultPlan:
        """``faults`` faults among the first ``calls`` calls of each operation; the same for the same
        seed on every machine."""
        chance = random.Random(seed)
        drawn: dict[tuple[str, int], Effect] = {}
        for _ in range(faults):
            call = (chance.choice(list(operations)), chance.randint(1, calls))
            drawn[call] = chance.choice(list(effects))
        return cls(tuple(Fault(name, drawn[name, nth], nth) for name, nth in sorted(drawn)))

    def to_code(self) -> str:
        """Python that makes this plan again: to paste into a test."""
        names = {"FaultPlan"}
        faults = "".join(f"        {_code(fault, names)},\n" for fault in self.faults)
        body = f"FaultPlan(\n    (\n{faults}    )\n)" if faults else "FaultPlan()"
        from_api = sorted(names & {"ErrorKind", "Retry"})
        lines = [f"from kvferry.api import {', '.join(from_api)}"] if from_api else []
        lines += [
            f"from kvferry.testing.faults import {', '.join(sorted(names - set(from_api)))}",
            "",
            f"plan = {body}",
        ]
        return "\n".join(lines) + "\n"

    @contextlib.contextmanager
    def told(self) -> Iterator[FaultPlan]:
        """An exception that leaves the block carries the plan's code in its notes."""
        try:
            yield self
        except BaseException as error:
            error.add_note(f"the fault plan was\n\n{self.to_code()}")
            raise


class FaultPlayer:
    """Counts calls against a plan. Any thread; the order of calls is the callers' own."""

    def __init__(self, plan: FaultPlan) -> None:
        self.plan = plan
        self.fired: list[Fault] = []
        """The faults that came to pass, in order."""
        self._calls: Counter[Fault] = Counter()
        self._lock = threading.Lock()

    def meet(self, operation: str, subject: str = "") -> Effect | None:
        """Count one call; what it meets, if anything. Of several faults the first in the plan."""
        met: Effect | None = None
        with self._lock:
            for fault in self.plan.faults:
                if fault.operation != operation or not fnmatch.fnmatchcase(subject, fault.subject):
                    continue
                self._calls[fault] += 1
                if met is None and fault.nth in (None, self._calls[fault]):
                    met = fault.effect
                    self.fired.append(fault)
        return met

    def unfired(self) -> list[Fault]:
        """Faults that never came to pass: often a plan that looks elsewhere than it should."""
        return [fault for fault in self.plan.faults if fault not in self.fired]


def crash(effect: Crash, where: str) -> NoReturn:
    """Die as the effect says."""
    if effect.by is CrashBy.EXITING:
        os._exit(137)
    raise InjectedCrash(where)


def check_applies(plan: FaultPlan, allowed: dict[str, tuple[type, ...]], injector: str) -> None:
    """Raise :class:`KVFerryError` (``CONFIG``) for faults that ``injector`` could never inject: a test
    that waits for them would pass without them."""
    for fault in plan.faults:
        kinds = allowed.get(fault.operation)
        if kinds is None or not isinstance(fault.effect, kinds):
            raise KVFerryError(
                f"{injector} cannot do {type(fault.effect).__name__} to {fault.operation!r}",
                kind=ErrorKind.CONFIG,
                where="fault plan",
                remedy=f"its operations are {', '.join(allowed)}"
                if kinds is None
                else f"{fault.operation} can meet {', '.join(kind.__name__ for kind in kinds)}",
            )


def _code(value: object, names: set[str]) -> str:
    if isinstance(value, enum.Enum):
        names.add(type(value).__name__)
        return f"{type(value).__name__}.{value.name}"
    kind: type = type(value)
    if attrs.has(kind):
        names.add(kind.__name__)
        shown = [
            f"{part.name}={_code(getattr(value, part.name), names)}"
            for part in attrs.fields(kind)
            if getattr(value, part.name) != part.default
        ]
        return f"{kind.__name__}({', '.join(shown)})"
    return repr(value)
