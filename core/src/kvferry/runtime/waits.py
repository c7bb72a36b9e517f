"""What requests have of the tiers below the first, and what it costs them."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import define, frozen

from kvferry.control.brought import Brought, Source
from kvferry.control.lower import LowerTierReport
from kvferry.runtime.requests import RequestState


@frozen(kw_only=True)
class LowerStatistics:
    """Totals since the start, except ``rises_under_way`` and what the reports say is so."""

    tiers: tuple[LowerTierReport, ...]
    """Fast to slow."""
    risen_tokens: int
    """Of the tokens that were hit, those that had come up for it out of these tiers."""
    waits: int
    """Times that the engine was told to ask again later."""
    waits_expired: int
    """Requests whose time to wait was over before all that they waited for had come."""
    wait_seconds: float
    """How long requests were kept waiting, together."""
    rises_under_way: int
    rises_shared: int
    """Requests that found what they need on its way already."""
    rises_expired: int
    """Prefixes that were given up at their deadline."""


@define
class Waits:
    """Counts what requests wait. On the scheduler's thread; the totals may be read from any.

    What a request spends in the engine's queue is no wait: that begins when the engine would run it, and
    is told to ask again later.
    """

    risen_tokens: int = 0
    borrowed_tokens: int = 0
    count: int = 0
    seconds: float = 0.0

    def told(self, state: RequestState, later: bool, now: float) -> None:
        """The engine asked, and was told to ask again ``later`` or what there is."""
        if later and not state.waiting_since:
            self.count += 1
            state.waiting_since = now
        elif not later:
            self.end(state, now)

    def end(self, state: RequestState, now: float) -> None:
        """The request waits no longer."""
        if state.waiting_since:
            self.seconds += now - state.waiting_since
            state.waiting_since = 0.0

    def rising(self, state: RequestState) -> None:
        """Something begins to come up for the request."""
        if state.held_tokens < 0:
            state.held_tokens = state.matched_tokens

    def loaded(
        self,
        state: RequestState,
        end: int,
        digests: Mapping[int, bytes],
        chunk_tokens: int,
        brought: Brought,
    ) -> None:
        """Its tokens are loaded up to ``end``, behind those that the engine has, out of these chunks."""
        if state.held_tokens < 0:
            return
        start = max(state.local_tokens, state.held_tokens)
        for chunk, digest in digests.items():
            tokens = min(end, (chunk + 1) * chunk_tokens) - max(start, chunk * chunk_tokens)
            if tokens <= 0:
                continue
            match brought.source(digest):
                case Source.TIER:
                    self.risen_tokens += tokens
                case Source.PEER:
                    self.borrowed(tokens)

    def borrowed(self, tokens: int) -> None:
        """The engine takes so many tokens out of what was read from a peer for them."""
        self.borrowed_tokens += tokens
