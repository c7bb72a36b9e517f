"""Which plugins are installed. Reads metadata files and imports nothing."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterable
from importlib.metadata import Distribution

from attrs import frozen
from packaging.utils import canonicalize_name

from kvferry.api import ENTRY_POINT_GROUP, OFFER_GROUP
from kvferry.compat.guard import Raised, call_foreign
from kvferry.plugins.records import Owner, Provided

_NO_NAME = "(no name)"
"""What is left of a distribution after half an uninstallation; two of them are not the same one."""

DistributionSource = Callable[[], Iterable[Distribution]]
"""Where installed distributions come from; a test hands in its own."""


def installed_distributions() -> Iterable[Distribution]:
    """Every distribution on this process's path."""
    return importlib.metadata.distributions()


@frozen(kw_only=True)
class Candidate:
    """One entry point of the group ``kvferry.plugins``.

    ``requires`` are the distribution's raw ``Requires-Dist`` lines. ``offers`` is what it says about
    itself in the group ``kvferry.offers``: read without an import, so it is good for a hint about a
    plugin that is not listed, for finding who brings a command, and for nothing else.
    """

    name: str
    module: str
    distribution: str
    version: str
    requires: tuple[str, ...] = ()
    offers: tuple[Provided, ...] = ()

    @property
    def owner(self) -> Owner:
        """The distribution with its version."""
        return Owner(name=self.distribution, version=self.version)

    @property
    def label(self) -> str:
        """``distribution version``."""
        return str(self.owner)


def discover(distributions: Iterable[Distribution]) -> tuple[Candidate, ...]:
    """All candidates, sorted by name and distribution.

    A distribution that is on the path twice counts once, the first one: that is also the one whose
    modules Python would import. One whose metadata cannot be read is passed over, because nothing
    in it says that it is a plugin of ours.
    """
    found: list[Candidate] = []
    seen: set[str] = set()
    for distribution in distributions:
        read = call_foreign(lambda dist=distribution: _candidates(dist))  # type: ignore[misc]
        if isinstance(read, Raised) or not read.value:
            continue
        identity = canonicalize_name(read.value[0].distribution)
        if identity not in seen:
            found += read.value
        if read.value[0].distribution != _NO_NAME:
            seen.add(identity)
    return tuple(sorted(found, key=lambda each: (each.name, each.distribution)))


def _candidates(distribution: Distribution) -> tuple[Candidate, ...]:
    # Reading the small text first keeps this cheap: parsing the metadata of every distribution of
    # an engine's environment takes a tenth of a second.
    text = distribution.read_text("entry_points.txt")
    if text is None or ENTRY_POINT_GROUP not in text:
        return ()
    points = [point for point in distribution.entry_points if point.group == ENTRY_POINT_GROUP]
    requires = tuple(distribution.requires or ()) if points else ()
    return tuple(
        Candidate(
            name=point.name,
            module=point.value,
            distribution=_field(distribution, "Name") or _NO_NAME,
            version=_field(distribution, "Version") or "(no version)",
            requires=requires,
            offers=_offers(distribution, point.name),
        )
        for point in points
    )


def _offers(distribution: Distribution, plugin: str) -> tuple[Provided, ...]:
    """``eviction.s3fifo = the_plugin`` in the metadata says that the plugin brings this policy."""
    found = []
    for point in distribution.entry_points:
        kind, dot, name = point.name.partition(".")
        if point.group == OFFER_GROUP and point.value == plugin and dot:
            found.append(Provided(kind=kind, name=name))
    return tuple(found)


def _field(distribution: Distribution, name: str) -> str:
    # Asking for one field that is not there is about to become an error in Python.
    found = distribution.metadata.get_all(name)
    return str(found[0]) if found else ""
