"""What the scheduler side knows of one engine request, and how its tokens become plans."""

from __future__ import annotations

import enum
from collections.abc import Sequence

from attrs import define, frozen

from kvferry.control.keys import KeyChain, MediaItem
from kvferry.control.loans import Loan


@frozen
class PinRequest:
    """Keep what a request hits or stores for ``seconds``, under a name that operators see."""

    name: str
    seconds: float


@frozen(kw_only=True)
class RequestOptions:
    """What a client may ask for one request. ``ttl`` is how many seconds the chunks that it stores
    live; ``None`` leaves it to the tier."""

    store: bool = True
    load: bool = True
    pin: PinRequest | None = None
    ttl: float | None = None


class LoadMode(enum.Enum):
    """When matched chunks are copied into the engine's blocks."""

    AUTO = "auto"
    """In front of the forward pass when nothing else runs and the load is short, else beside it."""
    ASYNC = "async"
    """Beside the forward passes of other requests; costs the engine steps of its own."""
    SYNC = "sync"
    """In front of the forward pass of the request's own step."""


class LoadState(enum.Enum):
    """Where a request is with its load. A request loads at most once between preemptions."""

    NONE = "none"
    MATCHED = "matched"
    """Chunks are leased; the engine has not allocated blocks yet."""
    LOADING = "loading"
    FINISHED = "finished"


@define(kw_only=True)
class RequestState:
    """One request, from its first match to its end.

    ``tokens`` is the engine's own growing sequence of token ids. ``blocks`` holds one block table
    per KV cache group, as the scheduler's output told it. ``next_chunk`` is the first chunk whose
    bytes this request has not yet offered to the tier.
    """

    id: str
    tokens: Sequence[int]
    prompt_tokens: int
    chain: KeyChain
    salt: str
    options: RequestOptions
    model: str = ""
    """Name of the adapter; empty for the served base model."""
    media: tuple[MediaItem, ...] = ()
    blocks: tuple[list[int], ...] = ()
    settled: int = 0
    """Tokens that were computed before the step under way. What a window had left behind by then is
    anybody's now."""
    next_chunk: int = 0
    saved_tail: int = 0
    """Tokens of the longest beginning that was offered as a tail, counted from the prompt's start."""
    load: LoadState = LoadState.NONE
    load_beside: bool = True
    """Whether the matched chunks are to be loaded beside other requests' forward passes."""
    lease: int = 0
    matched_slots: tuple[int, ...] = ()
    matched_tokens: int = 0
    matched_version: int = -1
    local_tokens: int = 0
    rise: int = 0
    """Number of the rise from a lower tier that it waits for; 0 if none."""
    wait_until: float = 0.0
    """When it stops waiting for lower tiers; 0 before it began."""
    wait_seconds: float = 0.0
    """How long it may wait for them."""
    waiting_since: float = 0.0
    """When the engine was first told to ask again later; 0 while it is not."""
    held_tokens: int = -1
    """Tokens that the first tier had before anything came up for it; below 0 if nothing did."""
    asked: bool = False
    """Whether the engine has asked for it; until then nobody is kept waiting."""
    sought_from: int = -1
    """Tokens that the first tier had when the lower ones were last asked: asking again is of use only
    when more has come."""
    loan: Loan | None = None
    """What a peer lends it, to be read into its blocks."""
    hit_tokens: int = 0
    """What of ``matched_tokens`` lies beyond ``local_tokens`` and can be restored."""
    preemptions: int = 0
    saves: int = 0
    """Transfers of this request that have been planned and have no result yet."""
    prompt_saved: bool = False
    refused_chunks: int = 0
    """Number of complete chunks at the time of the last refusal for lack of room."""
    orphaned: bool = False
    """A chunk was refused because the one before it is no longer resident."""
    outdated: bool = False
    """Its blocks were computed or loaded before the cache was cleared, so they are not stored."""
    counted: bool = False
    keyed: bool = False

    def extend_chain(self, valid: int) -> None:
        """Let the chain cover the first ``valid`` tokens, hashing only those that are new.

        All media items lie in the prompt, so the first call covers the whole prompt.
        """
        if not self.keyed:
            self.keyed = True
            self.chain.extend(self.tokens[: self.prompt_tokens], media=self.media)
        if valid > self.chain.tokens:
            self.chain.extend(self.tokens[self.chain.tokens : valid])

    def forget_blocks(self) -> None:
        """The engine took all blocks away (preemption)."""
        self.blocks = ()
        self.load = LoadState.NONE
        self.matched_slots = ()
        self.matched_tokens = 0
        self.local_tokens = 0
        self.hit_tokens = 0
        self.wait_until = 0.0
        self.sought_from = -1
        self.held_tokens = -1
        self.outdated = False
