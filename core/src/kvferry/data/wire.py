"""Messages of the side channel between a scheduler and its workers.

Encoded as MessagePack by msgspec: typed, bounded, and never code. Every message of a worker carries
its rank and epoch, so that a message of an earlier life is recognised.
"""

from __future__ import annotations

import msgspec

from kvferry.control.grants import ARENA
from kvferry.data.plans import TransferResult

WIRE_VERSION = 5
MAXIMUM_MESSAGE_BYTES = 16 << 20


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """A worker introduces itself. ``fingerprint`` must equal the scheduler's own."""

    version: int
    token: str
    rank: int
    world_size: int
    epoch: int
    fingerprint: str
    slots: int
    slot_bytes: int
    clock: float = 0.0
    """What the worker's clock says, in seconds."""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """``slots`` slots from the start of the arena may be used now. ``clock`` is the worker's."""

    rank: int
    epoch: int
    slots: int
    clock: float = 0.0


class Done(msgspec.Struct, frozen=True, tag="done"):
    """Outcomes of transfers."""

    rank: int
    epoch: int
    results: tuple[TransferResult, ...]


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """The worker lives."""

    rank: int
    epoch: int


class Bye(msgspec.Struct, frozen=True, tag="bye"):
    """The worker ends in order: it copies nothing any more."""

    rank: int
    epoch: int


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """A chunk of a tier that is read and written by key. ``expires`` is in seconds since 1970, 0 for
    never; the rest as in :class:`kvferry.api.ChunkHeader`."""

    digest: bytes
    parent: bytes | None
    depth: int
    tokens: int
    owner: str
    model: str
    aliases: tuple[tuple[bytes, int], ...]
    expires: float


class TierContent(msgspec.Struct, frozen=True, tag="tier-content"):
    """A part of what a tier held when it was opened, the least recently used first; ``last`` says that it
    is open now. ``foreign`` are full keys of other namespaces."""

    rank: int
    epoch: int
    tier: str
    opening: int
    chunks: tuple[Chunk, ...]
    foreign: tuple[bytes, ...]
    last: bool


class TierClosed(msgspec.Struct, frozen=True, tag="tier-closed"):
    """A tier is not open on this rank any more, or could not be opened: ``reason`` says why."""

    rank: int
    epoch: int
    tier: str
    opening: int
    reason: str


class ChannelOpened(msgspec.Struct, frozen=True, tag="channel-opened"):
    """The channel of this rank is open in the epoch ``channel_epoch``. ``export`` is for the same rank of
    peers, see :meth:`kvferry.api.Channel.export`. ``shard`` and ``slot_bytes`` must be the same on both
    ranks, or neither could read the other's slots."""

    rank: int
    epoch: int
    channel_epoch: bytes
    export: bytes
    shard: bytes
    slot_bytes: int


class ChannelClosed(msgspec.Struct, frozen=True, tag="channel-closed"):
    """The channel of this rank is not open in that epoch any more, and all its pulls have ended; or it
    could not be opened: ``reason`` says why."""

    rank: int
    epoch: int
    channel_epoch: bytes
    reason: str


class OrderDone(msgspec.Struct, frozen=True, tag="order-done"):
    """The end of an order on this rank. ``faults`` names what failed by its place in the order."""

    rank: int
    epoch: int
    id: int
    faults: dict[int, str] = {}
    reason: str = ""


class OpenTier(msgspec.Struct, frozen=True, tag="open-tier"):
    """Open a tier, the ``opening``-th time. ``instance`` and ``namespace`` as in
    :class:`kvferry.api.BackendContext`."""

    tier: str
    opening: int
    instance: str
    namespace: bytes
    header_bytes: int


class CloseTier(msgspec.Struct, frozen=True, tag="close-tier"):
    """Close a tier; orders of other openings mean nothing from now on."""

    tier: str
    opening: int


class StoreChunks(msgspec.Struct, frozen=True, tag="store-chunks"):
    """Delete ``evicted``, then write what the slots of the first tier hold."""

    id: int
    tier: str
    opening: int
    evicted: tuple[bytes, ...]
    chunks: tuple[Chunk, ...]
    slots: tuple[int, ...]
    seconds: float


class FetchChunks(msgspec.Struct, frozen=True, tag="fetch-chunks"):
    """Read chunks of so many ``tokens`` into slots of the first tier."""

    id: int
    tier: str
    opening: int
    digests: tuple[bytes, ...]
    tokens: tuple[int, ...]
    slots: tuple[int, ...]
    seconds: float


class DeleteChunks(msgspec.Struct, frozen=True, tag="delete-chunks"):
    """Delete chunks: digests of this namespace, or full keys."""

    id: int
    tier: str
    opening: int
    digests: tuple[bytes, ...]
    seconds: float


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Nobody waits for this order any more. It is answered all the same. ``tier`` is empty for a pull, and
    for what is being staged."""

    id: int
    tier: str


class OpenChannel(msgspec.Struct, frozen=True, tag="open-channel"):
    """Open the channel. ``instance`` and ``epoch`` as in :class:`kvferry.api.ChannelContext`. Of a channel
    that is open in this epoch, that is told again."""

    instance: str
    epoch: bytes


class CloseChannel(msgspec.Struct, frozen=True, tag="close-channel"):
    """Close the channel that was opened in this epoch, and forget all peers."""

    epoch: bytes


class MeetPeer(msgspec.Struct, frozen=True, tag="meet-peer"):
    """The same rank of the instance ``peer`` can be reached by what it exported in its epoch. Takes the place
    of what was known of an earlier epoch. Means nothing while the channel is not open."""

    peer: str
    epoch: bytes
    export: bytes


class ForgetPeer(msgspec.Struct, frozen=True, tag="forget-peer"):
    """Give up the way to a peer, if it is known in this epoch. What is read from it fails."""

    peer: str
    epoch: bytes


class PullChunks(msgspec.Struct, frozen=True, tag="pull-chunks"):
    """Read chunks of so many ``tokens`` out of slots of the same rank of a peer, in its region of that name,
    into slots of the first tier. ``deadline`` is a time of the scheduler's clock."""

    id: int
    peer: str
    epoch: bytes
    digests: tuple[bytes, ...]
    tokens: tuple[int, ...]
    from_slots: tuple[int, ...]
    slots: tuple[int, ...]
    deadline: float
    region: str = ARENA


class StageChunks(msgspec.Struct, frozen=True, tag="stage-chunks"):
    """Copy chunks of so many ``tokens`` out of slots of the first tier into slots of the staging, the first
    ones first."""

    id: int
    tokens: tuple[int, ...]
    from_slots: tuple[int, ...]
    slots: tuple[int, ...]
    seconds: float


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The scheduler accepted the hello. ``lead`` as in :class:`Lead`."""

    epoch: int
    lead: float = 0.0


class Lead(msgspec.Struct, frozen=True, tag="lead"):
    """The worker's clock is at least so many seconds ahead of the scheduler's: the difference when the
    worker's last word came in, which may have been on its way for a while. So a time of the scheduler's clock
    plus the lead is never later than it was meant."""

    seconds: float


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The scheduler did not accept the hello; the worker stays without a cache."""

    reason: str


class SayHello(msgspec.Struct, frozen=True, tag="say-hello"):
    """The scheduler does not know the sender: it should introduce itself again."""


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """An operator's question, encoded; ``version`` says how. The form of this message never changes."""

    version: int
    token: str
    question: msgspec.Raw


class Told(msgspec.Struct, frozen=True, tag="told"):
    """The answer, encoded, or why there is none. The form of this message never changes."""

    version: int
    refused: str = ""
    answer: msgspec.Raw = msgspec.Raw(b"\xc0")


TierOrder = OpenTier | CloseTier | StoreChunks | FetchChunks | DeleteChunks | Cancel
PeerOrder = OpenChannel | CloseChannel | MeetPeer | ForgetPeer | PullChunks | StageChunks | Cancel
WorkerOrder = TierOrder | PeerOrder
FromWorker = (
    Hello | Ready | Done | Beat | Bye | TierContent | TierClosed | ChannelOpened | ChannelClosed | OrderDone
)
ToWorker = Welcome | Lead | Refused | SayHello | WorkerOrder
