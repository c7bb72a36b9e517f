"""What the directory keeps of each instance."""

from __future__ import annotations

from attrs import define

from kvferry_sharing_p2p.directory.answers import Progress, Registration, SyncState, Wanted
from kvferry_sharing_p2p.directory.shelf import Shelf


@define(kw_only=True, eq=False)
class Member:
    """One life of one instance, from its registration until it leaves or is not heard any more."""

    instance: str
    epoch: bytes
    namespace: bytes
    ranks: int
    address: bytes
    session: bytes
    shelf: Shelf
    slot: int
    """The set that is served."""
    heard: float
    incoming: int | None = None
    """The set that will be served when the resynchronisation has ended."""
    moved: float = 0.0
    """When the resynchronisation last did."""
    sync: SyncState = SyncState.WANTED
    applied: int = 0
    told: int = 0
    """The highest sequence number that is known to have been sent."""
    handed_out: int = 0
    handed_at: int = 0
    """Which lookup it was the first answer of, the last time."""

    def is_same_as(self, namespace: bytes, ranks: int, address: bytes) -> bool:
        return (self.namespace, self.ranks, self.address) == (namespace, ranks, address)

    @property
    def slots(self) -> list[int]:
        """The sets that a change goes into."""
        return [self.slot] if self.incoming is None else [self.slot, self.incoming]

    @property
    def wanted(self) -> Wanted:
        if self.sync is SyncState.WANTED:
            return Wanted.SNAPSHOT
        return Wanted.CHANGES if self.told > self.applied else Wanted.NOTHING

    def progress(self) -> Progress:
        return Progress(session=self.session, applied=self.applied, wanted=self.wanted)

    def registration(self, heartbeat_seconds: float, limit_seconds: float) -> Registration:
        return Registration(
            session=self.session,
            heartbeat_seconds=heartbeat_seconds,
            limit_seconds=limit_seconds,
            applied=self.applied,
            wanted=self.wanted,
        )

    def begin(self, now: float) -> None:
        """Start over with an empty set beside the one that is served."""
        self.abandon()
        self.incoming = self.shelf.open_slot()
        self.moved = now
        self.sync = SyncState.RUNNING

    def finish(self) -> None:
        """The new set takes the place of the old one, at once."""
        if self.incoming is None:
            raise AssertionError(f"{self.instance} has no new set")
        old, self.slot, self.incoming = self.slot, self.incoming, None
        self.shelf.serve(self.slot)
        self.shelf.close_slot(old)
        self.sync = SyncState.CURRENT

    def abandon(self) -> None:
        """Forget a resynchronisation under way; what was served still is."""
        if self.incoming is not None:
            self.shelf.close_slot(self.incoming)
            self.incoming = None
        self.sync = SyncState.WANTED

    def forget(self) -> int:
        """End both sets; how many keys were served."""
        self.abandon()
        return self.shelf.close_slot(self.slot)
