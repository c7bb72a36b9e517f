"""What every conformance suite has in common: laws, claims and waivers.

A suite is a class of the kit whose ``test_*`` methods are laws. An author derives a class from it,
gives the few fixtures that the suite asks for, and runs pytest with ``-p kvferry.testing.plugin``::

    class TestAcme(BackendConformance):
        waivers = {"test_deleting_twice_is_the_same_as_once": "the store counts deletions"}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

import pytest

from kvferry.api import ErrorKind, KVFerryError

PLUGIN = "kvferry.testing.plugin"

_Law = TypeVar("_Law", bound=Callable[..., None])
_NEEDS = "__kvferry_needs__"

unclaimed_key: pytest.StashKey[tuple[str, ...]] = pytest.StashKey()
"""Where a test item keeps the abilities that its law needs and that are not claimed."""


def needs(*abilities: str) -> Callable[[_Law], _Law]:
    """The law holds for those who claim all of ``abilities``; for others it is skipped by name."""

    def mark(law: _Law) -> _Law:
        setattr(law, _NEEDS, abilities)
        return law

    return mark


class Conformance:
    """Base of all suites.

    A suite of the kit says ``kit=True`` when it derives, and its ``test_*`` methods become laws; the
    first sentence of a law's docstring is the law in words. Any other class is an author's: it may add
    tests and fixtures, and must leave the laws as they are. What it cannot fulfil it puts into
    ``waivers``, with a reason. A waived law runs, and must fail: a waiver that is not needed any more
    is a failure.

    Deriving raises :class:`KVFerryError` when a law is overridden, or when a waiver has no reason or
    names no law.
    """

    waivers: ClassVar[Mapping[str, str]] = {}
    """Reason by name of the law."""

    __test__: ClassVar[bool] = False
    _kit: ClassVar[bool] = True

    def __init_subclass__(cls, *, kit: bool = False) -> None:
        super().__init_subclass__()
        cls._kit = kit
        if "__test__" not in vars(cls):
            cls.__test__ = not kit
        if kit:
            _check_suite(cls)
        else:
            _check_author(cls)

    @classmethod
    def laws(cls) -> dict[str, Callable[..., None]]:
        """The laws that hold for this class, by name, in the order in which they are written."""
        found: dict[str, Callable[..., None]] = {}
        for suite in cls.suites():
            found |= {name: law for name, law in vars(suite).items() if name.startswith("test")}
        return found

    @classmethod
    def suites(cls) -> list[type[Conformance]]:
        """The suites of the kit that this class stands on, the most general first."""
        return [base for base in reversed(cls.__mro__) if issubclass(base, Conformance) and base._kit]

    @pytest.fixture
    def claims(self) -> frozenset[str]:
        """Names of the abilities that are claimed. A suite with such abilities overrides this."""
        return frozenset()

    @pytest.fixture(autouse=True)
    def _law_gate(self, request: pytest.FixtureRequest, claims: frozenset[str]) -> None:
        if not request.config.pluginmanager.has_plugin(PLUGIN):
            pytest.fail(f"conformance suites need the option  -p {PLUGIN}", pytrace=False)
        law = self.laws().get(request.node.originalname)
        missing = tuple(ability for ability in needed_by(law) if ability not in claims)
        if missing:
            request.node.stash[unclaimed_key] = missing
            pytest.skip(f"{request.node.originalname}: not claimed: {', '.join(missing)}")


def needed_by(law: Callable[..., None] | None) -> tuple[str, ...]:
    """The abilities that a law needs; none for anything that is no law."""
    found: tuple[str, ...] = getattr(law, _NEEDS, ())
    return found


def _check_suite(suite: type[Conformance]) -> None:
    for name, law in vars(suite).items():
        if name.startswith("test") and not getattr(law, "__doc__", None):
            raise _refused(
                suite, f"the law {name} does not say in words what it demands", "write a docstring"
            )
    _check_overrides(suite)


def _check_author(author: type[Conformance]) -> None:
    _check_overrides(author)
    laws = author.laws()
    waivers: Any = author.waivers
    if not isinstance(waivers, Mapping):
        raise _refused(author, "waivers is not a mapping", 'write  waivers = {"test_law": "reason"}')
    for name, reason in waivers.items():
        if name not in laws:
            raise _refused(
                author,
                f"the waiver {name!r} names no law",
                f"the laws are: {', '.join(laws)}",
            )
        if not isinstance(reason, str) or not reason.strip():
            raise _refused(author, f"the waiver of {name} has no reason", "say why the law cannot hold")


def _check_overrides(cls: type[Conformance]) -> None:
    """Every law has one definition; a mixin counts as much as the class itself."""
    for base in cls.__mro__:
        if "claims" in vars(base) and not getattr(base, "_kit", False):
            raise _refused(
                cls,
                f"{base.__qualname__} overrides claims, which decides what has to be proved",
                "remove it; claims come from the plugin's own spec",
            )
    names = [name for suite in cls.suites() for name in vars(suite) if name.startswith("test")]
    for name in (*names, "_law_gate"):
        *others, law_of = [base for base in cls.__mro__ if name in vars(base)]
        if others:
            raise _refused(
                cls,
                f"{others[0].__qualname__} overrides {name}, a law of {law_of.__qualname__}",
                "remove it; give a test of your own another name, and if the law cannot hold, say so:  "
                f'waivers = {{"{name}": "reason"}}',
            )


def _refused(cls: type[Conformance], what: str, remedy: str) -> KVFerryError:
    return KVFerryError(
        what, kind=ErrorKind.CONFIG, where=f"{cls.__module__}.{cls.__qualname__}", remedy=remedy
    )
