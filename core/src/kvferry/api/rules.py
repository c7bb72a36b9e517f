"""Facts and compatibility rules: frozen data with three-valued logic.

A rule reads facts by path. A fact that is missing makes an expression *unknown*, and unknown is not
a pass: an error rule whose requirement is unknown is reported as unverified.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from attrs import field, frozen


class Severity(enum.Enum):
    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


class Scope(enum.Enum):
    """What one application of a rule looks at."""

    INSTANCE = "instance"
    """One instance: its configuration, its engine and its host."""
    PAIR = "pair"
    """Every two instances that are checked together. Paths of theirs begin with ``one.`` and
    ``other.``; which is which must not matter. Facts of their host have no such beginning."""
    FLEET = "fleet"
    """All instances that are checked together, at once. Paths of theirs begin with ``instances.*.``;
    facts of their host have no such beginning."""


class Truth(enum.Enum):
    """Kleene's three values."""

    TRUE = "true"
    FALSE = "false"
    UNKNOWN = "unknown"

    def __and__(self, other: Truth) -> Truth:
        if Truth.FALSE in (self, other):
            return Truth.FALSE
        return Truth.UNKNOWN if Truth.UNKNOWN in (self, other) else Truth.TRUE

    def __or__(self, other: Truth) -> Truth:
        if Truth.TRUE in (self, other):
            return Truth.TRUE
        return Truth.UNKNOWN if Truth.UNKNOWN in (self, other) else Truth.FALSE

    def __invert__(self) -> Truth:
        return {
            Truth.TRUE: Truth.FALSE,
            Truth.FALSE: Truth.TRUE,
            Truth.UNKNOWN: Truth.UNKNOWN,
        }[self]

    @staticmethod
    def of(value: bool) -> Truth:
        return Truth.TRUE if value else Truth.FALSE


@frozen(kw_only=True)
class Fact:
    """One thing known, and how it is known.

    ``origin`` reads like ``config.yaml:12:5``, ``env KVFERRY__CHUNK_TOKENS``, ``default``,
    ``plugin backend_cpu``, ``probe /proc/meminfo``, ``engine`` or ``peer 10.0.0.2``.
    """

    path: str
    value: Any
    origin: str
    written: str = field(default="", eq=False)
    """The value as a configuration writes it, such as ``16GiB``; empty for a fact from elsewhere."""


Facts = Mapping[str, Fact]


class Expression(ABC):
    """A truth-valued formula over facts. Combine with ``&``, ``|`` and ``~``."""

    @abstractmethod
    def evaluate(self, facts: Facts) -> Truth: ...

    @abstractmethod
    def reads(self) -> tuple[str, ...]:
        """Paths of all facts the formula may look at, in order of appearance."""

    def needs(self) -> tuple[str, ...]:
        """Those of :meth:`reads` without which the formula can be unknown."""
        return self.reads()

    def __and__(self, other: Expression) -> Expression:
        return _Both(self, other)

    def __or__(self, other: Expression) -> Expression:
        return _Either(self, other)

    def __invert__(self) -> Expression:
        return _Not(self)


@frozen
class _Both(Expression):
    left: Expression
    right: Expression

    def evaluate(self, facts: Facts) -> Truth:
        return self.left.evaluate(facts) & self.right.evaluate(facts)

    def reads(self) -> tuple[str, ...]:
        return self.left.reads() + self.right.reads()

    def needs(self) -> tuple[str, ...]:
        return self.left.needs() + self.right.needs()

    def __str__(self) -> str:
        return f"{self.left} and {self.right}"


@frozen
class _Either(Expression):
    left: Expression
    right: Expression

    def evaluate(self, facts: Facts) -> Truth:
        return self.left.evaluate(facts) | self.right.evaluate(facts)

    def reads(self) -> tuple[str, ...]:
        return self.left.reads() + self.right.reads()

    def needs(self) -> tuple[str, ...]:
        return self.left.needs() + self.right.needs()

    def __str__(self) -> str:
        return f"({self.left} or {self.right})"


@frozen
class _Not(Expression):
    inner: Expression

    def evaluate(self, facts: Facts) -> Truth:
        return ~self.inner.evaluate(facts)

    def reads(self) -> tuple[str, ...]:
        return self.inner.reads()

    def needs(self) -> tuple[str, ...]:
        return self.inner.needs()

    def __str__(self) -> str:
        return f"not ({self.inner})"


@frozen
class Always(Expression):
    """True whatever is known."""

    def evaluate(self, facts: Facts) -> Truth:
        return Truth.TRUE

    def reads(self) -> tuple[str, ...]:
        return ()

    def __str__(self) -> str:
        return "always"


@frozen
class Check(Expression):
    """A named predicate over the values at ``paths``; unknown while one of them is missing.

    ``text`` is how the formula reads in a report. The predicate gets the values in the order of
    ``paths``, must not touch anything else, and must not raise on values of a schema-checked
    configuration.
    """

    text: str
    paths: tuple[str, ...]
    predicate: Callable[..., bool] = field(eq=False, repr=False)

    def evaluate(self, facts: Facts) -> Truth:
        values = []
        for path in self.paths:
            fact = facts.get(path)
            if fact is None:
                return Truth.UNKNOWN
            values.append(fact.value)
        return Truth.of(self.predicate(*values))

    def reads(self) -> tuple[str, ...]:
        return self.paths

    def __str__(self) -> str:
        return self.text


@frozen
class Known(Expression):
    """True when a fact exists, false when it does not; never unknown."""

    path: str

    def evaluate(self, facts: Facts) -> Truth:
        return Truth.of(self.path in facts)

    def reads(self) -> tuple[str, ...]:
        return (self.path,)

    def needs(self) -> tuple[str, ...]:
        return ()

    def __str__(self) -> str:
        return f"{self.path} is known"


@frozen(order=False)
class Path:
    """A fact to compare with a constant: ``Path("connector.load") == "sync"``."""

    path: str

    def __eq__(self, other: object) -> Expression:  # type: ignore[override]
        return Check(f"{self.path} == {other!r}", (self.path,), lambda v: bool(v == other))

    def __ne__(self, other: object) -> Expression:  # type: ignore[override]
        return Check(f"{self.path} != {other!r}", (self.path,), lambda v: bool(v != other))

    def __ge__(self, other: Any) -> Expression:
        return Check(f"{self.path} >= {other!r}", (self.path,), lambda v: bool(v >= other))

    def __le__(self, other: Any) -> Expression:
        return Check(f"{self.path} <= {other!r}", (self.path,), lambda v: bool(v <= other))

    def __gt__(self, other: Any) -> Expression:
        return Check(f"{self.path} > {other!r}", (self.path,), lambda v: bool(v > other))

    def __lt__(self, other: Any) -> Expression:
        return Check(f"{self.path} < {other!r}", (self.path,), lambda v: bool(v < other))

    def one_of(self, *values: object) -> Expression:
        text = ", ".join(repr(value) for value in values)
        return Check(f"{self.path} in ({text})", (self.path,), lambda v: v in values)

    def __hash__(self) -> int:
        return hash(self.path)


@frozen(kw_only=True)
class Example:
    """A set of facts with the outcome the rule must give; the tests run every one."""

    facts: Mapping[str, Any]
    passes: bool


@frozen(kw_only=True)
class Rule:
    """One compatibility rule.

    ``when`` decides whether the rule applies, ``require`` what must then hold. ``message`` and
    ``fix`` may name facts in braces, for example ``{engine.block_tokens}``, ``{tiers.*.capacity:size}`` for
    bytes with a unit, and ``{tiers.*.use:names}`` for the members that have it. ``each`` makes the rule
    a template over a section: with ``each="tiers"`` the paths ``tiers.*.capacity`` are read for
    every configured tier. Any other ``*`` collects: the value is a tuple with one item for each
    member, and ``tiers.*[capabilities.addressable].capacity`` takes only those members of which the
    fact in brackets is known and true. Two of them nest.
    """

    id: str
    severity: Severity
    when: Expression
    require: Expression
    message: str
    fix: str
    source: str
    """Where the rule comes from: ``design``, ``measured``, ``upstream-code …``, ``vendor-doc …``."""
    examples: tuple[Example, ...]
    each: str | None = None
    since: str = "0.1"
    scope: Scope = Scope.INSTANCE
    requires: tuple[str, ...] = ()
    """Ids of rules, of the same plugin or of core, without which this one says nothing of use. While
    one of them is violated or unverified, and not waived, this rule is not judged."""
    waivable: bool = True
    """False where nothing could run however good the reason."""
