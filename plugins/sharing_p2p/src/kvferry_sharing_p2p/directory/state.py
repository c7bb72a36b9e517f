"""The directory as a state machine: events in, answers out, with the time handed in."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from kvferry.api import DIGEST_BYTES
from kvferry_sharing_p2p.directory.answers import (
    DirectoryOptions,
    DirectoryStatus,
    Found,
    Holder,
    InstanceStatus,
    Progress,
    Refusal,
    RefusalReason,
    Registration,
    Stranger,
    SyncState,
    Totals,
)
from kvferry_sharing_p2p.directory.members import Member
from kvferry_sharing_p2p.directory.shelf import Shelf


class Directory:
    """Which instance has which chunks, as their publishers tell.

    **Keys.** A key is a digest of 32 bytes under a namespace of 32 bytes. An instance tells of chunks that
    it can serve to peers now, and of no others: that is the publisher's business. An answer is a hint, which
    the lease at the peer confirms or not. Where several keys are handed in they are one digest behind the
    other.

    **Registration.** Of several with one instance id, the one that lives stays until it leaves or was not
    heard for ``limit_seconds``; then another epoch may take its place, and starts with nothing. A session
    names a registration; whatever carries another one is answered with :class:`Stranger`.

    **Following.** The messages of a session have ascending sequence numbers and take effect in their order,
    each once: one that comes again is passed over, and one that comes too early is not kept but asked for
    again. :meth:`begin` may leave numbers out, as it makes what was before it irrelevant. From there on
    a second set grows, by :meth:`add` and :meth:`change`, while the one before it is served and changed too;
    :meth:`end` puts the second in its place. So the state is always that of a beginning of what was sent.

    Times are seconds of any clock that does not go back. ``epoch`` is random and new at every start. Not
    thread-safe.
    """

    def __init__(self, options: DirectoryOptions, epoch: bytes, now: float) -> None:
        self.options = options
        self.epoch = epoch
        self._started = now
        self._due = math.inf
        """Nobody is overdue before."""
        self._now = now
        self._members: dict[str, Member] = {}
        self._sessions: dict[bytes, Member] = {}
        self._shelves: dict[bytes, Shelf] = {}
        self._by_slot: dict[bytes, dict[int, Member]] = {}
        self._counts: Counter[str] = Counter()

    def register(
        self, instance: str, epoch: bytes, namespace: bytes, ranks: int, address: bytes, now: float
    ) -> Registration | Refusal:
        """Take an instance in, or say why not. ``address`` is what its peers need in order to reach it.

        The same again, by the same life of the instance, is answered with the session that it has."""
        self._sweep(now)
        known = self._members.get(instance)
        if known is None:
            if len(self._members) >= self.options.max_instances:
                return self._refuse(
                    RefusalReason.FULL, f"there are {len(self._members)} instances already", 0.0
                )
            known = self._welcome(instance, epoch, namespace, ranks, address, now)
        elif known.epoch != epoch:
            silent = now - known.heard
            return self._refuse(
                RefusalReason.TAKEN,
                f"another instance named {instance!r} was heard {silent:.1f} s ago; if it is gone, "
                f"its place is free {self.options.limit_seconds:g} s after it was heard last",
                self.options.limit_seconds - silent,
            )
        elif not known.is_same_as(namespace, ranks, address):
            return self._refuse(
                RefusalReason.CONTRADICTION,
                f"instance {instance!r} has registered with another namespace, address or number of ranks",
                self.options.limit_seconds,
            )
        known.heard = now
        return known.registration(self.options.heartbeat_seconds, self.options.limit_seconds)

    def heartbeat(self, session: bytes, sequence: int, now: float) -> Progress | Stranger:
        """The instance lives and has sent messages up to ``sequence``."""
        member = self._hear(session, now)
        if member is None:
            return Stranger(session=session)
        member.told = max(member.told, sequence)
        return member.progress()

    def leave(self, session: bytes, now: float) -> None:
        """The instance ends in order: its keys go, and its id is free. A session not known is no error."""
        self._sweep(now)
        member = self._sessions.get(session)
        if member is not None:
            self._part_with(member)

    def begin(self, session: bytes, sequence: int, now: float) -> Progress | Stranger:
        """All keys of the instance are going to be told anew."""
        member = self._hear(session, now)
        if member is None:
            return Stranger(session=session)
        member.told = max(member.told, sequence)
        if sequence <= member.applied:
            self._counts["duplicates"] += 1
            return member.progress()
        if member.incoming is not None:
            self._counts["abandoned_resyncs"] += 1
        member.begin(now)
        member.applied = sequence
        self._due = min(self._due, now + self.options.resync_seconds)
        return member.progress()

    def add(self, session: bytes, sequence: int, digests: bytes, now: float) -> Progress | Stranger:
        """A part of all keys of the instance. Raises ``ValueError`` unless the digests are whole."""
        keys = _whole(digests)
        member = self._hear(session, now)
        if member is None:
            return Stranger(session=session)
        if self._is_next(member, sequence, now):
            if member.incoming is None:
                member.abandon()
            else:
                member.shelf.hold(digests, [member.incoming])
                self._counts["changes"] += keys
                member.applied = sequence
        return member.progress()

    def end(self, session: bytes, sequence: int, now: float) -> Progress | Stranger:
        """All keys of the instance have been told: they take the place of what was known of it."""
        member = self._hear(session, now)
        if member is None:
            return Stranger(session=session)
        if self._is_next(member, sequence, now):
            if member.incoming is None:
                member.abandon()
            else:
                slots = self._by_slot[member.namespace]
                del slots[member.slot]
                member.finish()
                slots[member.slot] = member
                member.applied = sequence
                self._counts["resyncs"] += 1
        return member.progress()

    def change(
        self, session: bytes, sequence: int, added: bytes, removed: bytes, now: float
    ) -> Progress | Stranger:
        """Keys that came and, after that, keys that went. Raises ``ValueError`` unless they are whole."""
        keys = _whole(added) + _whole(removed)
        member = self._hear(session, now)
        if member is None:
            return Stranger(session=session)
        if self._is_next(member, sequence, now):
            member.shelf.hold(added, member.slots)
            member.shelf.drop(removed, member.slots)
            self._counts["changes"] += keys
            member.applied = sequence
        return member.progress()

    def find(self, namespace: bytes, digests: bytes, asker: str, now: float, limit: int = 1) -> Found:
        """Who, other than ``asker``, has the longest beginning of ``digests``; behind it, up to ``limit``
        in all, who has the next longest. Of equals, who was not the first answer for the longest time.

        Raises ``ValueError`` unless the digests are whole.
        """
        _whole(digests)
        self._sweep(now)
        self._counts["lookups"] += 1
        shelf = self._shelves.get(namespace)
        if shelf is None:
            return Found(holders=(), settled=self._settled(namespace, now))
        by_slot = self._by_slot[namespace]
        own = self._members.get(asker)
        but = own.slot if own is not None and own.shelf is shelf else None
        holders: list[Holder] = []
        for run in shelf.longest(digests, limit, but):
            equals = sorted((by_slot[slot] for slot in run.slots), key=_rested)
            if not holders:
                self._counts["hits"] += 1
                equals[0].handed_out += 1
                equals[0].handed_at = self._counts["hits"]
            holders += [
                Holder(
                    instance=member.instance,
                    epoch=member.epoch,
                    address=member.address,
                    ranks=member.ranks,
                    chunks=run.length,
                )
                for member in equals
            ]
        return Found(holders=tuple(holders[:limit]), settled=self._settled(namespace, now))

    def next_due(self) -> float:
        """When :meth:`status`, or any other call, may find somebody overdue at the earliest."""
        return self._due

    def status(self, now: float) -> DirectoryStatus:
        """How things stand."""
        self._sweep(now)
        members = sorted(self._members.values(), key=lambda member: member.instance)
        return DirectoryStatus(
            epoch=self.epoch.hex(),
            instances=tuple(
                InstanceStatus(
                    instance=member.instance,
                    epoch=member.epoch.hex(),
                    namespace=member.namespace.hex(),
                    ranks=member.ranks,
                    keys=member.shelf.count(member.slot),
                    incoming_keys=0 if member.incoming is None else member.shelf.count(member.incoming),
                    sync=member.sync,
                    lag=member.told - member.applied,
                    heard_seconds=now - member.heard,
                    handed_out=member.handed_out,
                )
                for member in members
            ),
            keys=sum(len(shelf) for shelf in self._shelves.values()),
            memory_bytes=sum(shelf.nbytes for shelf in self._shelves.values()),
            totals=Totals(**self._counts),
        )

    def keys_of(self, instance: str) -> Iterator[bytes]:
        """Every key that is served of an instance, in no order; nothing if it is not known. Slow."""
        member = self._members.get(instance)
        return iter(()) if member is None else member.shelf.keys(member.slot)

    def audit(self) -> None:
        """Raise ``AssertionError`` with the first contradiction found. Slow."""
        assert sorted(self._sessions.values(), key=id) == sorted(self._members.values(), key=id)
        assert self._shelves.keys() == {member.namespace for member in self._members.values()}
        for namespace, shelf in self._shelves.items():
            shelf.audit()
            here = [member for member in self._members.values() if member.shelf is shelf]
            slots = [slot for member in here for slot in member.slots]
            assert len(set(slots)) == len(slots) == shelf.slots, "sets are lost or shared"
            assert self._by_slot[namespace] == {member.slot: member for member in here}
            assert all(member.namespace == namespace for member in here)
        for member in self._members.values():
            where = f"instance {member.instance!r}"
            assert self._members[member.instance] is member
            assert self._sessions[member.session] is member
            assert self._now - member.heard <= self.options.limit_seconds, f"{where} is overdue"
            assert member.applied <= member.told, f"{where} was followed further than it has sent"
            running = member.sync is SyncState.RUNNING
            assert running == (member.incoming is not None), f"{where} has half a resynchronisation"

    def _refuse(self, reason: RefusalReason, text: str, seconds: float) -> Refusal:
        self._counts["refused"] += 1
        return Refusal(reason=reason, text=text, retry_seconds=max(seconds, self.options.heartbeat_seconds))

    def _welcome(
        self, instance: str, epoch: bytes, namespace: bytes, ranks: int, address: bytes, now: float
    ) -> Member:
        self._counts["registered"] += 1
        shelf = self._shelves.setdefault(namespace, Shelf())
        member = Member(
            instance=instance,
            epoch=epoch,
            namespace=namespace,
            ranks=ranks,
            address=address,
            session=self.epoch + self._counts["registered"].to_bytes(8, "big"),
            shelf=shelf,
            slot=shelf.open_slot(),
            heard=now,
        )
        shelf.serve(member.slot)
        self._members[instance] = self._sessions[member.session] = member
        self._by_slot.setdefault(namespace, {})[member.slot] = member
        self._due = min(self._due, now + self.options.limit_seconds)
        return member

    def _part_with(self, member: Member) -> int:
        """Forget an instance; how many keys it had."""
        del self._members[member.instance], self._sessions[member.session]
        del self._by_slot[member.namespace][member.slot]
        keys = member.forget()
        if not member.shelf.slots:
            del self._shelves[member.namespace], self._by_slot[member.namespace]
        return keys

    def _hear(self, session: bytes, now: float) -> Member | None:
        self._sweep(now)
        member = self._sessions.get(session)
        if member is not None:
            member.heard = now
        return member

    def _is_next(self, member: Member, sequence: int, now: float) -> bool:
        """Whether this message is the one to take effect now."""
        member.told = max(member.told, sequence)
        if sequence <= member.applied:
            self._counts["duplicates"] += 1
            return False
        if member.sync is SyncState.WANTED:
            return False
        if sequence > member.applied + 1:
            self._counts["gaps"] += 1
            return False
        member.moved = now
        return True

    def _sweep(self, now: float) -> None:
        """Let go of who was not heard, and of resynchronisations that do not move."""
        self._now = now
        if now <= self._due:
            return
        due = math.inf
        for member in list(self._members.values()):
            if now - member.heard > self.options.limit_seconds:
                self._counts["expired_instances"] += 1
                self._counts["expired_keys"] += self._part_with(member)
                continue
            due = min(due, member.heard + self.options.limit_seconds)
            if member.incoming is not None:
                if now - member.moved > self.options.resync_seconds:
                    self._counts["abandoned_resyncs"] += 1
                    member.abandon()
                else:
                    due = min(due, member.moved + self.options.resync_seconds)
        self._due = due

    def _settled(self, namespace: bytes, now: float) -> bool:
        here = self._by_slot.get(namespace, {}).values()
        young = now - self._started < self.options.limit_seconds
        return not young and all(member.sync is SyncState.CURRENT for member in here)


def _rested(member: Member) -> tuple[int, str]:
    return (member.handed_at, member.instance)


def _whole(digests: bytes) -> int:
    """How many digests these are."""
    keys, rest = divmod(len(digests), DIGEST_BYTES)
    if rest:
        raise ValueError(f"{len(digests)} bytes are not whole digests of {DIGEST_BYTES} bytes")
    return keys
