"""What a fact means: its type, its unit, and who gives it."""

from __future__ import annotations

import enum

from attrs import frozen


class FactKind(enum.Enum):
    """Type and unit of a fact's value. Closed; the value is how a table names it."""

    SIZE = "size"
    """Whole number of bytes; written with a unit, such as ``512GiB``."""
    DURATION = "duration"
    """Seconds; written with a unit, such as ``30s``."""
    COUNT = "whole number"
    NUMBER = "number"
    FLAG = "true or false"
    TEXT = "text"
    TEXTS = "list of texts"
    MAPPING = "mapping"
    """Names that the user made up, each with a value. Only a configuration holds such."""


class FactSource(enum.Enum):
    """Who gives a fact."""

    CONFIGURATION = "configuration"
    PLUGIN = "plugin"
    """A claim of a spec that the configuration selects."""
    HOST = "host"
    """A probe of the machine, or a facts file about it."""
    CORE = "core"
    """Core, which works it out of the configuration."""
    ENGINE = "engine"
    """The engine that starts, or a facts file about it."""
    PEER = "peer"
    """Another instance, when the two introduce themselves."""


@frozen(kw_only=True)
class FactSpec:
    """One path of facts. ``*`` in the path stands for the name of a member, such as a tier's."""

    path: str
    kind: FactKind
    meaning: str
    """A few words in lower case without a full stop."""
    source: FactSource
    at_least: float | None = None
    """The smallest number that makes sense, in the unit of the kind; ``None`` for any. A file of facts
    with less is refused."""
    sample: str = ""
    """A value as a file of facts writes it, for a template; empty for one that follows from the kind."""
