"""STG001 and following: what must hold for a staging in host memory.

What peers read is an arena of ``capacity`` bytes per rank, into which chunks of the first tier are copied;
what is read from peers passes through landing buffers. Both exist with any mode of reading but one.
"""

from __future__ import annotations

from kvferry.api import Check, Example, Known, Path, Rule, Severity

_IS_HOST = Path("staging.use") == "host"
_SHARES = Path("p2p.use") != None  # noqa: E711 - a formula, not a comparison
_PULLS = Path("p2p.pull") == True  # noqa: E712
_DELAYS = Path("p2p.delay") == True  # noqa: E712
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
_LIMIT = "channel.capabilities.max_registered_bytes"
_STAGED = ("staging.capacity", "p2p.buffer")
_GIB = 1 << 30
_MIB = 1 << 20


def _modes(
    *, pull: bool = True, delay: bool = False, land_on: str = "host", use: str | None = "p2p"
) -> dict[str, object]:
    return {
        "staging.use": "host",
        "staging.capacity": 8 * _GIB,
        "p2p.use": use,
        "p2p.pull": pull,
        "p2p.delay": delay,
        "p2p.land_on": land_on,
        "p2p.buffer": 128 * _MIB,
    }


def _channel(use: str | None, **claims: object) -> dict[str, object]:
    return {
        **_modes(),
        "channel.use": use,
        **{f"channel.capabilities.{claim}": value for claim, value in claims.items()},
    }


def _chunks(capacity: int, chunk: int) -> dict[str, object]:
    return {**_modes(), "staging.capacity": capacity, _CHUNK: chunk, _KINDS: ("full",)}


RULES: tuple[Rule, ...] = (
    Rule(
        id="STG001",
        severity=Severity.ERROR,
        when=_IS_HOST,
        require=Check(
            "p2p.use is set", ("p2p.use", "staging.capacity"), lambda use, _capacity: use is not None
        ),
        message="nothing is shared with other instances, so nobody would read what is staged, and "
        "{staging.capacity:size} of memory per worker would be taken for nothing",
        fix="remove the section staging, or share with  p2p: {use: p2p}",
        source="design",
        examples=(
            Example(facts=_modes(), passes=True),
            Example(facts=_modes(use=None), passes=False),
        ),
    ),
    Rule(
        id="STG002",
        severity=Severity.ERROR,
        when=_IS_HOST,
        require=Path("channel.use") != None,  # noqa: E711
        message="an arena is staged for a channel, and there is none",
        fix="set channel.use to tcp, or to another channel, and list its plugin",
        source="design",
        examples=(
            Example(facts=_channel("tcp"), passes=True),
            Example(facts=_channel(None), passes=False),
        ),
    ),
    Rule(
        id="STG003",
        severity=Severity.ERROR,
        when=_IS_HOST & _SHARES,
        require=_PULLS,
        requires=("STG001",),
        message="pull is false: whoever wrote into a peer's memory would need all of it registered, and a "
        "staging is there because that cannot be",
        fix="remove pull, or set it to true",
        source="upstream-code LMCache-Ascend: the same is an assertion there",
        examples=(
            Example(facts=_modes(), passes=True),
            Example(facts=_modes(delay=True, land_on="device"), passes=True),
            Example(facts=_modes(pull=False), passes=False),
            Example(facts=_modes(pull=False, land_on="device"), passes=False),
            Example(facts=_modes(pull=False, delay=True), passes=False),
            Example(facts=_modes(pull=False, delay=True, land_on="device"), passes=False),
        ),
    ),
    Rule(
        id="STG004",
        severity=Severity.ERROR,
        when=_IS_HOST & _SHARES & _PULLS & (Path("p2p.land_on") == "device"),
        require=_DELAYS,
        requires=("STG001", "STG003"),
        message="chunks are staged in host memory, and without delay they are read before the request "
        "begins: there is no way from an arena into the engine's memory that does not pass through the first "
        "tier",
        fix="set  delay: true, which reads through landing buffers into the engine's blocks, or  "
        "land_on: host",
        source="upstream-code LMCache-Ascend, which refuses the same",
        examples=(
            Example(facts=_modes(delay=True, land_on="device"), passes=True),
            Example(facts=_modes(), passes=True),
            Example(facts=_modes(land_on="device"), passes=False),
        ),
    ),
    Rule(
        id="STG005",
        severity=Severity.ERROR,
        when=_IS_HOST & (Path("channel.use") != None),  # noqa: E711
        require=Check(
            "channel.capabilities.staging",
            ("channel.capabilities.staging", "channel.use"),
            lambda staging, _use: bool(staging),
        ),
        message="the channel {channel.use} does not work out of a staging arena",
        fix="remove the section staging, so that peers read the first tier itself, or use another channel",
        source="upstream-code LMCache-Ascend: its channel hixl takes the option and fails at the first peer",
        examples=(
            Example(facts=_channel("tcp", staging=True), passes=True),
            Example(facts=_channel("hixl", staging=False), passes=False),
        ),
    ),
    Rule(
        id="STG006",
        severity=Severity.ERROR,
        when=_IS_HOST & _SHARES & _WITH_CHUNKS,
        require=Check(
            "staging.capacity >= engine.chunk_bytes",
            ("staging.capacity", _CHUNK),
            lambda capacity, chunk: bool(capacity >= chunk),
        ),
        requires=("STG001",),
        message="the staging holds {staging.capacity:size}, less than one chunk of "
        "{engine.chunk_bytes:size}, so peers could never read anything",
        fix="give it the chunks of all that peers read at once, or lower chunk_tokens",
        source="upstream-code LMCache-Ascend, which refuses the same",
        examples=(
            Example(facts=_chunks(8 * _GIB, 4 * _MIB), passes=True),
            Example(facts=_chunks(4 * _MIB, 4 * _MIB), passes=True),
            Example(facts=_chunks(2 * _MIB, 4 * _MIB), passes=False),
        ),
    ),
    Rule(
        id="STG007",
        severity=Severity.ERROR,
        when=_IS_HOST & _SHARES & (Path("channel.use") != None),  # noqa: E711
        require=Check(
            f"{_LIMIT} is not set or >= staging.capacity + p2p.buffer",
            (_LIMIT, *_STAGED, "channel.use"),
            lambda most, capacity, buffer, _use: most is None or bool(capacity + buffer <= most),
        ),
        requires=("STG001", "STG005"),
        message=f"the channel {{channel.use}} registers {{{_LIMIT}:size}} at the most, and the arena of "
        "{staging.capacity:size} with the landing buffers of {p2p.buffer:size} is more",
        fix="lower staging.capacity or p2p.buffer",
        source="vendor-doc: drivers that register about 20 GB of host memory",
        examples=(
            Example(facts=_channel("tcp", max_registered_bytes=None), passes=True),
            Example(facts=_channel("road", max_registered_bytes=20 * _GIB), passes=True),
            Example(facts=_channel("road", max_registered_bytes=8 * _GIB), passes=False),
        ),
    ),
    Rule(
        id="STG008",
        severity=Severity.NOTE,
        when=_IS_HOST & (Path("channel.use") != None),  # noqa: E711
        require=Check(f"{_LIMIT} is set", (_LIMIT, "channel.use"), lambda most, _use: most is not None),
        requires=("STG005",),
        message="the channel {channel.use} claims no limit of what it registers, so peers could read the "
        "first tier itself, without a copy",
        fix="remove the section staging where the system registers the whole tier",
        source="vendor-doc: the manual of LMCache-Ascend prefers whole registration where it works",
        examples=(
            Example(facts=_channel("road", max_registered_bytes=20 * _GIB), passes=True),
            Example(facts=_channel("tcp", max_registered_bytes=None), passes=False),
        ),
    ),
)
