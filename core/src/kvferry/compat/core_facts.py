"""What the facts mean that core gives, or that every engine gives it."""

from __future__ import annotations

from kvferry.api import FactKind, FactSource, FactSpec

_HOST = (
    ("kvferry.version", FactKind.TEXT, "version of kvferry"),
    ("kvferry.api", FactKind.TEXT, "version of the contract with plugins"),
    ("host.python", FactKind.TEXT, "version of the Python interpreter"),
    ("host.cpus", FactKind.COUNT, "processors that this process may use"),
    ("host.memory_bytes", FactKind.SIZE, "memory of the machine, or the control group's limit where lower"),
    ("host.memory_available_bytes", FactKind.SIZE, "memory that is free now under all limits"),
    ("host.shm_free_bytes", FactKind.SIZE, "free space of /dev/shm"),
    ("host.huge_pages_shmem", FactKind.TEXT, "the kernel's setting of huge pages for memory files"),
    ("host.huge_pages_reserved_bytes", FactKind.SIZE, "huge pages that are set aside and free"),
    ("native.available", FactKind.FLAG, "whether the native copy loops are in use"),
    ("native.why", FactKind.TEXT, "why they are in use, or why not"),
    ("native.version", FactKind.TEXT, "version of kvferry-native"),
)
_ENGINE = (
    (
        "engine.block_tokens",
        FactKind.COUNT,
        "tokens in one block, of several groups the least that is whole blocks of each",
    ),
    ("engine.chunk_bytes", FactKind.SIZE, "bytes of one chunk of chunk_tokens in one worker"),
    ("engine.workers", FactKind.COUNT, "workers (ranks) of the engine on this host"),
    ("engine.device", FactKind.TEXT, "where the engine keeps its KV cache, such as cpu"),
    ("engine.group_kinds", FactKind.TEXTS, "kind of each KV cache group of the model, such as full"),
)
_CLAIMS = (
    ("tiers.*.capabilities.addressable", FactKind.FLAG, "the tier's backend gives memory with slots in it"),
    ("tiers.*.capabilities.persistent", FactKind.FLAG, "its chunks outlive the process"),
    ("tiers.*.capabilities.shared", FactKind.FLAG, "several instances may use the same store"),
    (
        "tiers.*.capabilities.servable_to_peers",
        FactKind.FLAG,
        "a channel may read a chunk right from the tier",
    ),
    (
        "tiers.*.capabilities.needs_host_buffer",
        FactKind.FLAG,
        "it cannot read into or write from device memory",
    ),
    (
        "tiers.*.capabilities.max_value_bytes",
        FactKind.SIZE,
        "the largest chunk that it takes; not set for any",
    ),
    ("channel.capabilities.memory", FactKind.TEXTS, "kinds of memory that the channel can register"),
    ("channel.capabilities.read", FactKind.FLAG, "it reads a peer's memory, which does nothing for it"),
    ("channel.capabilities.write", FactKind.FLAG, "it writes a peer's memory, which does nothing for it"),
    (
        "channel.capabilities.register_before_connect",
        FactKind.FLAG,
        "a peer sees only what was registered before it connected",
    ),
    ("channel.capabilities.same_host", FactKind.FLAG, "it reaches peers on this machine alone"),
    ("channel.capabilities.max_ops", FactKind.COUNT, "operations that one call takes; not set for any"),
    (
        "channel.capabilities.max_registered_bytes",
        FactKind.SIZE,
        "memory that it can register together; not set where only the system limits it",
    ),
    (
        "channel.capabilities.reconnect",
        FactKind.FLAG,
        "a peer that comes back is reached without opening it again",
    ),
    (
        "channel.capabilities.staging",
        FactKind.FLAG,
        "it may work out of a staging arena, in place of whole tiers",
    ),
    ("devices.*.name", FactKind.TEXT, "a device that a listed plugin knows"),
    (
        "listed.connectors",
        FactKind.TEXTS,
        "connectors that listed plugins provide; not known while one of them cannot be used",
    ),
)
_PLACES = (
    ("tiers.*.place.front", FactKind.FLAG, "the tier is the first, through whose memory all bytes pass"),
    (
        "tiers.*.place.idle_keys",
        FactKind.TEXTS,
        "keys that were set and do nothing there: on the first tier those of lower ones, on others its own",
    ),
)
_SHARING = (
    (
        "sharing.*.host_bytes",
        FactKind.SIZE,
        "memory per worker that sharing takes beside the tiers: the arena of the staging, and the buffers "
        "that reads land in, which another device than cpu may hold itself",
    ),
)
_AT_LEAST_ONE = frozenset(
    (
        "host.cpus",
        "host.memory_bytes",
        "engine.block_tokens",
        "engine.chunk_bytes",
        "engine.workers",
    )
)
_SAMPLES = {"engine.block_tokens": "128"}

CORE_FACTS = tuple(
    FactSpec(
        path=path,
        kind=kind,
        meaning=meaning,
        source=source,
        at_least=1 if path in _AT_LEAST_ONE else None,
        sample=_SAMPLES.get(path, ""),
    )
    for source, rows in (
        (FactSource.HOST, _HOST),
        (FactSource.ENGINE, _ENGINE),
        (FactSource.PLUGIN, _CLAIMS),
        (FactSource.CORE, (*_PLACES, *_SHARING)),
    )
    for path, kind, meaning in rows
)
