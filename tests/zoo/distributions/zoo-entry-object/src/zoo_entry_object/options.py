"""Keys of the tier."""

from __future__ import annotations

from attrs import frozen


@frozen(kw_only=True)
class Options:
    depth: int = 1
