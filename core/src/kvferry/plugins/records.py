"""What is known of each plugin: one row, one state, one reason."""

from __future__ import annotations

import enum

from attrs import field, frozen

from kvferry.api import ErrorKind, KVFerryError, Manifest, Retry


class PluginState(enum.Enum):
    """Closed set of states."""

    FOUND = "found"
    """Installed and not listed: nothing of it was imported."""
    CONFLICT = "conflict"
    """Its name, or a name it provides, has two owners."""
    MISSING = "missing"
    """Listed and not installed."""
    REJECTED = "rejected"
    """Its own metadata or manifest says that it is for another kvferry."""
    FAILED = "failed"
    """It could not be imported, or what it says of itself is wrong."""
    READY = "ready"
    """Listed, checked, usable."""


BROKEN_STATES = frozenset(
    {PluginState.CONFLICT, PluginState.MISSING, PluginState.REJECTED, PluginState.FAILED}
)


@frozen(kw_only=True)
class PluginRequest:
    """One entry of ``plugins:``.

    ``distribution`` picks one of several that bring the same name. ``required`` is false only where
    the user wrote ``on_error: skip``. ``origin`` is the place in the configuration.
    """

    name: str
    distribution: str | None = None
    required: bool = True
    origin: str = ""

    @classmethod
    def parse(cls, text: str, *, required: bool = True, origin: str = "") -> PluginRequest:
        """``name`` or ``name@distribution``."""
        name, at, distribution = text.partition("@")
        return cls(
            name=name,
            distribution=distribution if at else None,
            required=required,
            origin=origin,
        )


@frozen(kw_only=True)
class Provided:
    """One spec that a plugin brings: ``backend cpu``."""

    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


@frozen(kw_only=True)
class Owner:
    """A distribution that brings a plugin: ``kvferry-backend-cpu 0.1.0``."""

    name: str
    version: str

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


@frozen(kw_only=True)
class PluginRecord:
    """The row of one plugin.

    ``distributions`` holds every owner, more than one only in a conflict. ``manifest`` is there as
    soon as it could be read, so a plugin that a later gate refused still shows its API range.
    ``offers`` is what the distribution's metadata says, nothing imported; ``provides`` what the plugin
    brought. ``meant`` is the installed plugin that the name of a missing one most likely means.
    ``reason`` and ``remedy`` are sentences, empty while nothing is wrong. ``remarks`` are sentences
    about a plugin that works and could do better. ``error`` is the exception behind the reason, where
    there was one.
    """

    name: str
    state: PluginState
    distributions: tuple[Owner, ...] = ()
    module: str = ""
    manifest: Manifest | None = None
    provides: tuple[Provided, ...] = ()
    offers: tuple[Provided, ...] = ()
    reason: str = ""
    remedy: str = ""
    meant: str = ""
    remarks: tuple[str, ...] = ()
    listed: bool = False
    required: bool = False
    origin: str = ""
    error: BaseException | None = field(default=None, eq=False, repr=False)

    @property
    def broken(self) -> bool:
        """Listed and not usable."""
        return self.listed and self.state in BROKEN_STATES

    @property
    def distribution(self) -> str:
        """``name version``, several joined by ``and``, empty for a plugin that is not installed."""
        return " and ".join(map(str, self.distributions))

    def as_error(self) -> KVFerryError:
        """The row as the error that a start ends with."""
        return KVFerryError(
            f"plugin '{self.name}' {_PHRASES[self.state]}",
            kind=ErrorKind.PLUGIN,
            where=self.origin,
            why=self.reason,
            remedy=self.remedy,
            retry=Retry.AFTER_CHANGE,
        )


_PHRASES = {
    PluginState.FOUND: "is installed and not listed",
    PluginState.CONFLICT: "is in conflict",
    PluginState.MISSING: "is not installed",
    PluginState.REJECTED: "is rejected",
    PluginState.FAILED: "failed",
    PluginState.READY: "is ready",
}
