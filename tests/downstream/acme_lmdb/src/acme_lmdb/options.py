"""What a user may say about an LMDB tier."""

from attrs import frozen


@frozen(kw_only=True)
class LmdbOptions:
    """Own keys in the tier's section; the capacity is core's."""

    path: str
    """A folder. Each rank of each instance makes one of its own below it."""
