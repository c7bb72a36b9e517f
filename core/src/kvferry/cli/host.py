"""What the command line takes from its process; a test hands in its own."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import Distribution

from attrs import field, frozen


def _environment() -> Mapping[str, str]:
    return dict(os.environ)


@frozen(kw_only=True)
class Host:
    """Environment variables, the root of the file system to probe, and the installed distributions."""

    environment: Mapping[str, str] = field(factory=_environment)
    root: str = "/"
    distributions: Callable[[], Iterable[Distribution]] = importlib.metadata.distributions
