"""What the asker of reads between instances has to say, and to whom."""

from __future__ import annotations

from attrs import frozen

from kvferry.api import PeerAsk, PeerId


@frozen
class FindHolders:
    """Who has the longest beginning of ``digests``? The answer is for
    :meth:`~kvferry.control.borrowing.Borrowing.found`."""

    id: int
    digests: tuple[bytes, ...]
    deadline: float


@frozen
class Greet:
    """Agree with this peer on what is to be agreed on. The answer is for
    :meth:`~kvferry.control.borrowing.Borrowing.agreed`, or
    :meth:`~kvferry.control.borrowing.Borrowing.lost`."""

    peer: PeerId
    address: bytes


@frozen
class TellAsk:
    peer: PeerId
    ask: PeerAsk


@frozen
class TellRenew:
    """:meth:`~kvferry.control.borrowing.Borrowing.renewed` takes the answer, with the ``turn``."""

    peer: PeerId
    number: int
    turn: int


@frozen
class TellDone:
    """Nothing is read under this ask any more, or ever will be."""

    peer: PeerId
    number: int


Tell = FindHolders | Greet | TellAsk | TellRenew | TellDone
