"""What a request looks for beyond the first tier."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from attrs import frozen

from kvferry.control.lower import LowerTier
from kvferry.control.manager import CacheManager
from kvferry.control.matching import MatchCursor, TailKeys
from kvferry.control.outcomes import LeaseOutcome
from kvferry.control.rises import Rises
from kvferry.control.segments import TierSegment


@frozen(kw_only=True)
class Wanted:
    """What a request looks for: the prefix of ``keys`` and ``tail_keys``, as in
    :meth:`CacheManager.match`, up to ``limit_tokens``. The first tier has ``held_tokens`` of it, and
    ``local_tokens`` are the engine's own already."""

    request: str
    salt: str
    keys: Sequence[bytes]
    tail_keys: TailKeys
    limit_tokens: int
    held_tokens: int
    local_tokens: int
    asked: bool = True
    """Whether the engine would run the request now."""


class Elsewhere(Protocol):
    """Where else chunks may be than in this instance's tiers."""

    @property
    def wait_seconds(self) -> float:
        """How long a request waits for what is there."""
        ...

    @property
    def for_all(self) -> bool:
        """Whether what is found there is of use to other requests as well."""
        ...

    def worth(self, wanted: Wanted, skip: int, reached: int) -> bool:
        """Whether to look there for what comes behind ``skip`` chunks and ``reached`` tokens."""
        ...

    def begin(self, rise: int, wanted: Wanted, skip: int, reached: int, now: float) -> None:
        """Look there, for a rise that is open-ended."""
        ...


class Seek:
    """Looks for a prefix in the lower tiers, slice by slice, and has what is missing above brought up; what
    they do not have is looked for ``elsewhere``.

    Call :meth:`advance` under the manager's lock until it returns ``False``; :attr:`rise` is then the
    number of the rise to wait for, or 0.
    """

    def __init__(
        self,
        rises: Rises,
        tiers: Sequence[LowerTier],
        wanted: Wanted,
        chunk_tokens: int,
        elsewhere: Elsewhere | None = None,
    ) -> None:
        self.rise = 0
        self.wait_seconds = 0.0
        """How long the slowest tier that has some of it may take."""
        self._rises = rises
        self._elsewhere = elsewhere
        self._tiers = deque(tier for tier in tiers if tier.usable)
        self._wanted = wanted
        self._chunk = chunk_tokens
        self._first_chunk = self._next_chunk = wanted.held_tokens // chunk_tokens
        self._reached = max(wanted.held_tokens, wanted.local_tokens)
        self._segments: list[TierSegment] = []
        self._cursor: MatchCursor | None = None

    def advance(self, now: float) -> bool:
        wanted = self._wanted
        if self._cursor is None and not self._segments and self._next_chunk < len(wanted.keys):
            self.rise = self._rises.join(wanted.keys[self._next_chunk], wanted.request)
            if self.rise:
                self.wait_seconds = max(
                    [0.0, *(tier.settings.load_deadline for tier in self._tiers)]
                    + ([] if self._elsewhere is None else [self._elsewhere.wait_seconds])
                )
                return False
        if not self._tiers:
            return self._finish(now)
        tier = self._tiers[0]
        if self._cursor is None:
            if not tier.usable:
                self._tiers.popleft()
                return True
            self._cursor = tier.index.match_in_slices(
                f"rise of {wanted.request}", wanted.keys, wanted.tail_keys, wanted.limit_tokens
            )
            self._index = tier.index
        if self._cursor.advance(now):
            return True
        self._take(self._tiers.popleft(), self._index, self._cursor)
        self._cursor = None
        return True

    def _take(self, tier: LowerTier, index: CacheManager, cursor: MatchCursor) -> None:
        match = cursor.match
        if match.lease is None:
            return
        gain = match.tokens - self._reached
        if gain <= 0 or gain < tier.settings.min_load_tokens or index is not tier.index:
            index.release(match.lease)
            return
        if index.begin_load(match.lease) is not LeaseOutcome.OK:
            return
        self._segments.append(TierSegment(tier, index, match.lease, self._next_chunk, len(match.slots)))
        self._next_chunk = match.tokens // self._chunk
        self._reached = match.tokens
        self.wait_seconds = max(self.wait_seconds, tier.settings.load_deadline)

    def _finish(self, now: float) -> bool:
        wanted, elsewhere = self._wanted, self._elsewhere
        if elsewhere is not None and not elsewhere.worth(wanted, self._next_chunk, self._reached):
            elsewhere = None
        if not self._segments and elsewhere is None:
            return False
        if elsewhere is not None:
            self.wait_seconds = max(self.wait_seconds, elsewhere.wait_seconds)
        last = self._segments[-1].stop if self._segments else self._first_chunk
        if elsewhere is not None and elsewhere.for_all:
            last = len(wanted.keys)
        self.rise = self._rises.start(
            wanted.request,
            wanted.salt,
            self._segments,
            wanted.keys[self._first_chunk : last],
            now + self.wait_seconds,
            open_ended=elsewhere is not None,
        )
        if elsewhere is not None:
            elsewhere.begin(self.rise, wanted, self._next_chunk, self._reached, now)
        return False
