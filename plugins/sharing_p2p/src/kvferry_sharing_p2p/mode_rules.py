"""P2P006 to P2P015, P2P019, P2P029: how peers are read, and what that needs of tiers, memory and channel."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.api import Check, Example, Known, Path, Rule, Severity

_IS_P2P = Path("p2p.use") == "p2p"
_PULLS = Path("p2p.pull") == True  # noqa: E712 - a formula, not a comparison
_DELAYS = Path("p2p.delay") == True  # noqa: E712
_ON_DEVICE = Path("p2p.land_on") == "device"
# The plugin of this staging judges what must hold of pulls through it: one fault has one id.
_NOT_THROUGH_HOST = Path("staging.use") != "host"
_LANDS = _DELAYS | (Path("staging.use") != None)  # noqa: E711
"""Reads pass through landing buffers."""
_CHUNK = "engine.chunk_bytes"
_KINDS = "engine.group_kinds"
_WITH_CHUNKS = (Known(_CHUNK) | Known("engine.block_tokens")) & (
    ~Known(_KINDS)
    | Check(
        "the engine has KV cache groups and all can be restored",
        (_KINDS,),
        lambda kinds: len(kinds) > 0 and all(kind in ("full", "mla", "sliding") for kind in kinds),
    )
)
"""With an engine that gets hits, a size of chunks that is not known is told and is not passed over."""
_FRONT = "tiers.*[place.front].capacity"
_LIMIT = "channel.capabilities.max_registered_bytes"
_GIB = 1 << 30
_MIB = 1 << 20


def _modes(
    *,
    pull: bool = True,
    delay: bool = False,
    land_on: str = "host",
    keep: bool = True,
    staging: str | None = None,
    **more: object,
) -> dict[str, object]:
    return {
        "p2p.use": "p2p",
        "p2p.pull": pull,
        "p2p.delay": delay,
        "p2p.land_on": land_on,
        "p2p.buffer": 128 * _MIB,
        "p2p.keep": keep,
        "staging.use": staging,
        **more,
    }


def _buffered(
    buffer: int, chunk: int, staging: str | None = None, *, delay: bool = True
) -> dict[str, object]:
    modes = _modes(delay=delay, land_on="device" if delay else "host", staging=staging)
    return {**modes, "p2p.buffer": buffer, _CHUNK: chunk, _KINDS: ("full",)}


def _lower(*, persistent: bool = True, shared: bool = False, servable: bool = False) -> dict[str, object]:
    return {
        "p2p.use": "p2p",
        "tiers.far.use": "files",
        "tiers.far.place.front": False,
        "tiers.far.capabilities.persistent": persistent,
        "tiers.far.capabilities.shared": shared,
        "tiers.far.capabilities.servable_to_peers": servable,
    }


def _times(lease: float, guard: float, load_deadline: float = 5.0) -> dict[str, object]:
    times = {"p2p.lease": lease, "p2p.guard": guard, "p2p.load_deadline": load_deadline}
    return {"p2p.use": "p2p", **times}


def _registered(first: int, most: int | None, *, delay: bool = False) -> dict[str, object]:
    return {
        **_modes(delay=delay, land_on="device" if delay else "host"),
        "tiers.cpu.place.front": True,
        "tiers.cpu.capacity": first,
        "channel.use": "road",
        _LIMIT: most,
    }


def _fits(most: int | None, firsts: Sequence[int], buffer: int, delay: bool) -> bool:
    return most is None or sum(firsts) + (buffer if delay else 0) <= most


MODE_RULES: tuple[Rule, ...] = (
    Rule(
        id="P2P006",
        severity=Severity.ERROR,
        when=_IS_P2P & ~_DELAYS & _NOT_THROUGH_HOST,
        require=_PULLS,
        message="pull is false, and nobody writes into a peer's memory: who needs chunks reads them, and "
        "there is no other way",
        fix="remove pull, or set it to true; an instance that is to lend and not to borrow has a large "
        "min_load_tokens",
        source="design",
        examples=(
            Example(facts=_modes(), passes=True),
            Example(facts=_modes(pull=False), passes=False),
            Example(facts=_modes(pull=False, land_on="device"), passes=False),
        ),
    ),
    Rule(
        id="P2P007",
        severity=Severity.ERROR,
        when=_IS_P2P & _DELAYS & _NOT_THROUGH_HOST,
        require=_PULLS,
        message="delay says when chunks are read, and pull is false: nothing would be read, neither then nor "
        "before",
        fix="remove pull, or set it to true",
        source="upstream-code LMCache-Ascend: the same is an assertion there",
        examples=(
            Example(facts=_modes(delay=True, land_on="device"), passes=True),
            Example(facts=_modes(pull=False, delay=True, land_on="device"), passes=False),
            Example(facts=_modes(pull=False, delay=True), passes=False),
        ),
    ),
    Rule(
        id="P2P008",
        severity=Severity.ERROR,
        when=_IS_P2P & _PULLS & _DELAYS,
        require=_ON_DEVICE,
        message="delay reads while the engine's blocks are filled, through buffers in the engine's kind of "
        "memory, and land_on is {p2p.land_on}",
        fix="set  land_on: device, which with an engine on cpu is plain memory, or  delay: false",
        source="upstream-code LMCache-Ascend, which warns and reads eagerly instead",
        examples=(
            Example(facts=_modes(delay=True, land_on="device"), passes=True),
            Example(facts=_modes(delay=True, land_on="device", staging="host"), passes=True),
            Example(facts=_modes(delay=True), passes=False),
            Example(facts=_modes(delay=True, staging="host"), passes=False),
        ),
    ),
    Rule(
        id="P2P009",
        severity=Severity.ERROR,
        when=_IS_P2P & _PULLS & _ON_DEVICE & _NOT_THROUGH_HOST,
        require=Check("p2p.delay", ("p2p.delay", "p2p.buffer"), lambda delay, _buffer: bool(delay)),
        message="without delay a request begins once all its chunks are read, so with land_on: device the "
        "whole hit would have to fit in the buffer of {p2p.buffer:size}",
        fix="set  delay: true, which lets the hit pass through the buffer, or  land_on: host, which reads "
        "into the first tier",
        source="design",
        examples=(
            Example(facts=_modes(delay=True, land_on="device"), passes=True),
            Example(facts=_modes(), passes=True),
            Example(facts=_modes(land_on="device"), passes=False),
        ),
    ),
    Rule(
        id="P2P010",
        severity=Severity.ERROR,
        when=_IS_P2P & ~_DELAYS,
        require=Path("p2p.keep") == True,  # noqa: E712 - a formula, not a comparison
        message="without delay chunks are read into the first tier, which keeps them, and keep is false",
        fix="remove keep, or set  delay: true  and  land_on: device",
        source="design",
        examples=(
            Example(facts=_modes(), passes=True),
            Example(facts=_modes(delay=True, land_on="device", keep=False), passes=True),
            Example(facts=_modes(keep=False), passes=False),
            Example(facts=_modes(keep=False, staging="host"), passes=False),
        ),
    ),
    Rule(
        id="P2P011",
        severity=Severity.ERROR,
        when=_IS_P2P & _PULLS & _LANDS & _WITH_CHUNKS,
        require=Check(
            "p2p.buffer >= 2 x engine.chunk_bytes",
            ("p2p.buffer", _CHUNK),
            lambda buffer, chunk: bool(buffer >= 2 * chunk),
        ),
        message="the buffer that reads pass through is {p2p.buffer:size}, two halves of which one is read "
        "into while the other is emptied, and one chunk has {engine.chunk_bytes:size}",
        fix="raise buffer to many chunks, or lower chunk_tokens",
        source="design",
        examples=(
            Example(facts=_buffered(128 * _MIB, 4 * _MIB), passes=True),
            Example(facts=_buffered(_MIB, 4 * _MIB, delay=False), passes=True),
            Example(facts=_buffered(7 * _MIB, 4 * _MIB), passes=False),
            Example(facts=_buffered(7 * _MIB, 4 * _MIB, "host", delay=False), passes=False),
        ),
    ),
    Rule(
        id="P2P012",
        severity=Severity.WARNING,
        each="tiers",
        when=_IS_P2P
        & (Path("tiers.*.place.front") == False)  # noqa: E712 - a formula, not a comparison
        & (Path("tiers.*.capabilities.persistent") == True)  # noqa: E712
        & (Path("tiers.*.capabilities.shared") == False),  # noqa: E712
        require=Check(
            "tiers.*.capabilities.servable_to_peers",
            ("tiers.*.capabilities.servable_to_peers", "tiers.*.use"),
            lambda servable, _use: bool(servable),
        ),
        message="peers are served out of the first tier alone: what lies only in this tier, of the backend "
        "{tiers.*.use}, is not offered to them",
        fix="give the first tier the capacity for what peers ask for, or waive this if the rest need not be "
        "shared",
        source="vendor-doc: the manual of LMCache-Ascend forbids P2P beside a disk; here it only finds less",
        examples=(
            Example(facts=_lower(servable=True), passes=True),
            Example(facts=_lower(persistent=False), passes=True),
            Example(facts=_lower(shared=True), passes=True),
            Example(facts=_lower(), passes=False),
        ),
    ),
    Rule(
        id="P2P013",
        severity=Severity.ERROR,
        when=_IS_P2P,
        require=Check(
            "p2p.guard < p2p.lease", ("p2p.guard", "p2p.lease"), lambda guard, lease: bool(guard < lease)
        ),
        message="nothing is read in the last {p2p.guard} seconds of a lease, and leases last {p2p.lease} "
        "seconds, so nothing could ever be read",
        fix="set lease to many times guard; the defaults are 30s and 1s",
        source="design",
        examples=(
            Example(facts=_times(30.0, 1.0), passes=True),
            Example(facts=_times(1.0, 1.0), passes=False),
        ),
    ),
    Rule(
        id="P2P014",
        severity=Severity.WARNING,
        when=_IS_P2P,
        require=Check(
            "p2p.lease - p2p.guard >= p2p.load_deadline",
            ("p2p.lease", "p2p.guard", "p2p.load_deadline"),
            lambda lease, guard, deadline: bool(lease - guard >= deadline),
        ),
        requires=("P2P013",),
        message="leases of {p2p.lease} seconds, less {p2p.guard} seconds of guard, end before the "
        "{p2p.load_deadline} seconds that a request waits for its chunks, so slow reads end without them "
        "unless a renewal comes through in time",
        fix="raise lease above load_deadline and guard together, or lower load_deadline",
        source="design",
        examples=(
            Example(facts=_times(30.0, 1.0), passes=True),
            Example(facts=_times(6.0, 1.0), passes=True),
            Example(facts=_times(5.0, 1.0), passes=False),
        ),
    ),
    Rule(
        id="P2P015",
        severity=Severity.ERROR,
        when=_IS_P2P & (Path("channel.use") != None) & (Path("staging.use") == None),  # noqa: E711
        require=Check(
            f"{_LIMIT} is not set or >= capacity of the first tier, and p2p.buffer with p2p.delay",
            (_LIMIT, _FRONT, "p2p.buffer", "p2p.delay", "channel.use"),
            lambda most, firsts, buffer, delay, _use: _fits(most, firsts, buffer, delay),
        ),
        message=f"the channel {{channel.use}} registers {{{_LIMIT}:size}} at the most, and what peers read, "
        f"the first tier, has {{{_FRONT}:size}}",
        fix="use staging, for example  staging: {use: host, capacity: 8GiB}, which registers an arena in "
        "place of the tier; or lower the tier's capacity",
        source="vendor-doc: drivers that register about 20 GB of host memory",
        examples=(
            Example(facts=_registered(16 * _GIB, None), passes=True),
            Example(facts=_registered(16 * _GIB, 16 * _GIB), passes=True),
            Example(facts=_registered(16 * _GIB, 8 * _GIB), passes=False),
            Example(facts=_registered(16 * _GIB, 16 * _GIB, delay=True), passes=False),
        ),
    ),
    Rule(
        id="P2P019",
        severity=Severity.ERROR,
        when=_IS_P2P & (Path("channel.use") != None),  # noqa: E711
        require=Check(
            "channel.capabilities.read",
            ("channel.capabilities.read", "channel.use"),
            lambda read, _use: bool(read),
        ),
        message="chunks are read out of a peer's memory, and the channel {channel.use} does not read",
        fix="use a channel that claims reads, such as tcp",
        source="design",
        examples=(
            Example(
                facts={"p2p.use": "p2p", "channel.use": "tcp", "channel.capabilities.read": True}, passes=True
            ),
            Example(
                facts={"p2p.use": "p2p", "channel.use": "mail", "channel.capabilities.read": False},
                passes=False,
            ),
        ),
    ),
    Rule(
        id="P2P029",
        severity=Severity.NOTE,
        when=_IS_P2P & _DELAYS & Known(_KINDS),
        require=Check(
            "none of engine.group_kinds is sliding", (_KINDS,), lambda kinds: "sliding" not in kinds
        ),
        requires=("P2P007", "P2P008"),
        message="the model has a sliding window, so chunks of peers are read into the first tier before a "
        "request begins, in spite of delay",
        fix="nothing to mend",
        source="design",
        examples=(
            Example(facts={**_modes(delay=True, land_on="device"), _KINDS: ("full",)}, passes=True),
            Example(
                facts={**_modes(delay=True, land_on="device"), _KINDS: ("full", "sliding")}, passes=False
            ),
        ),
    ),
)
