"""Keys of a channel between processes of one host."""

from __future__ import annotations

import enum

from attrs import Attribute, field, frozen

MOST_THREADS = 64


class Mechanism(enum.Enum):
    """How a peer's memory is reached. Either gives the same results."""

    AUTO = "auto"
    """``mapped`` where the memory has a memory file, ``cross-process`` elsewhere."""
    MAPPED = "mapped"
    CROSS_PROCESS = "cross-process"


class Readers(enum.Enum):
    """Whom this process lets read its memory where Yama is set to ``ptrace_scope`` 1."""

    PEER = "peer"
    """The process of a connected peer. Yama knows one such process at a time: the first of several."""
    ANY = "any"
    """Every process of the same user, for more than one peer."""
    NOBODY = "nobody"
    """Yama is left alone."""


class _Unusable(ValueError):
    """What a validator says of a value; the report shows ``remedy`` as its fix."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(what)
        self.remedy = remedy


def _threads(_self: object, _attribute: Attribute[int], value: int) -> None:
    if value < 1:
        raise _Unusable("is below 1", "write 1 or more, or remove the key")
    if value > MOST_THREADS:
        raise _Unusable(f"is above {MOST_THREADS}", f"write {MOST_THREADS} or less, or remove the key")


@frozen(kw_only=True)
class LocalOptions:
    """Keys of the section ``channel:`` beside ``use``."""

    mechanism: Mechanism = field(
        default=Mechanism.AUTO,
        metadata={
            "doc": "mapped: memory files of the peer are mapped; cross-process: the kernel copies from the "
            "peer's memory; auto: mapped where there is a memory file"
        },
    )
    threads: int = field(
        default=2,
        validator=_threads,
        metadata={"doc": "how many threads copy, for operations of this process and for writes of its peers"},
    )
    readers: Readers = field(
        default=Readers.PEER,
        metadata={
            "doc": "whom Yama (ptrace_scope 1) lets read memory without a memory file: peer, the process of "
            "one peer; any, all processes of this user; nobody"
        },
    )
