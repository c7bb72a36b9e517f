"""The figures of channels and of reads between instances."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tests.bench.figure import Figure, Goal

VERBS = ("read", "write")
STEPS_AT_MOST = 1.03
STAGED_AT_LEAST = 1 / 1.2


def _figure(
    bench: str, name: str, *path: str, unit: str = "", at_least: float = 0.0, at_most: float = 0.0
) -> Figure:
    goal = Goal.AT_LEAST if at_least else Goal.AT_MOST if at_most else Goal.NONE
    return Figure(bench=bench, name=name, path=path, unit=unit, goal=goal, target=at_least or at_most)


def _local_channel() -> Iterator[Figure]:
    for threads in (1, 2):
        for mechanism, verb, target in (
            ("mapped", "read", 0.8),
            ("mapped", "write", 0.8),
            ("cross-process", "read", 0.8),
            ("cross-process", "write", 0.6),
        ):
            row = f"{mechanism} {verb}, {threads} threads"
            name = f"local channel, {row}, to memcpy"
            yield _figure("local_channel", name, row, "to memcpy", at_least=target)
    for threads, target in ((1, 0.0), (2, 1.0)):  # two are what it has unless it is told otherwise
        for verb in VERBS:
            row = f"{verb} beside NIXL, {threads} threads"
            for mechanism in ("mapped", "cross-process"):
                name = f"{mechanism} {verb}, {threads} threads, to NIXL's UCX backend"
                yield _figure("local_channel", name, row, f"{mechanism} to NIXL", at_least=target)
            for who in ("mapped", "cross-process", "NIXL"):
                yield _figure("local_channel", f"{row}: {who}", row, f"{who} GB/s", unit="GB/s")


def _tcp_channel() -> Iterator[Figure]:
    bench = "tcp_channel"
    for verb in VERBS:
        row = f"{verb}, 4 connections"
        name = f"TCP channel over loopback, {row}, to bare sockets"
        yield _figure(bench, name, row, "to bare sockets", at_least=0.9)
    for verb in VERBS:
        row = f"{verb} beside other engines"
        yield _figure(bench, f"{verb} to Mooncake's TCP engine", row, "to Mooncake", at_least=1.0)
        yield _figure(bench, f"{verb} to NIXL's UCX backend over TCP", row, "to NIXL")
        for who in ("channel", "Mooncake", "NIXL"):
            yield _figure(bench, f"{verb}, {who}", row, f"{who} GB/s", unit="GB/s")


CHANNELS: Sequence[Figure] = (*_local_channel(), *_tcp_channel())


def _staging_copy() -> Iterator[Figure]:
    for threads in (1, 2):
        row = f"{threads} threads"
        name = f"staging, {row}, to memcpy"
        yield _figure("staging_copy", name, row, "to memcpy", at_least=STAGED_AT_LEAST)
        for who in ("staging", "memcpy"):
            yield _figure("staging_copy", f"{who}, {row}", row, f"{who} GB/s", unit="GB/s")


def _delayed_pull() -> Iterator[Figure]:
    for channel, target in (("as fast as the blocks are filled", 1.5), ("local", 1.15)):
        for chunks in (16, 64):
            row = f"{channel}, {chunks} chunks"
            name = f"delayed pull of {4 * chunks} MiB, channel {channel}, to one after the other"
            yield _figure("delayed_pull", name, row, "to one after the other", at_least=target)
            for way in ("delayed", "one after the other"):
                yield _figure("delayed_pull", f"{way}, {row}", row, f"{way} GB/s", unit="GB/s")
    for pages in (128, 4):
        name = f"filling blocks in pages of {pages} KiB"
        yield _figure("delayed_pull", name, f"filling {pages} KiB pages GB/s", unit="GB/s")


def _lookup() -> Iterator[Figure]:
    def shown(name: str, *path: str, at_most: float = 0.0) -> Figure:
        return _figure("p2p_lookup", name, *path, unit="ms", at_most=at_most)

    yield shown("what a hit held by a peer adds", "hit", "all", "median_ms", at_most=3.0)
    yield shown("the same, 99th percentile", "hit", "all", "p99_ms")
    for stage in (
        "until the directory is asked",
        "the directory",
        "until the peer is asked",
        "the peer",
        "until its chunks are read",
    ):
        yield shown(f"of it: {stage}", "hit", stage, "median_ms")
    yield shown("what a miss adds", "miss", "all", "median_ms", at_most=3.0)
    yield shown("the same, 99th percentile", "miss", "all", "p99_ms")
    yield shown("a hit here with new chunks behind it waits", "here, with more behind it", "median_ms")
    yield shown("an idle engine has its hit after", "hit of an engine that steps", "median_ms")
    yield shown("an idle engine knows of a miss after", "miss of an engine that steps", "median_ms")
    yield shown("the first lookup at a peer", "first_ms")
    name = "lookup of a hit here, with other instances to without"
    yield _figure("p2p_lookup", name, "here", "shared_to_alone", at_most=1.1)
    for who in ("shared", "alone"):
        yield _figure("p2p_lookup", f"lookup of a hit here, {who}", "here", f"{who}_us", unit="µs")


def _serving() -> Iterator[Figure]:
    bench = "p2p_serving"
    ways = (("ask", "asks"), ("read", "asks and reads"))
    for way, does in ways:
        name = f"answers to a peer that {does} while the engine computes, 99th percentile"
        yield _figure(bench, name, "answers", way, "p99_ms", unit="ms", at_most=25.0)
        yield _figure(bench, "the same, median", "answers", way, "median_ms", unit="ms")
    for way, does, target in (
        ("ask 100", "asks 100 times a second", STEPS_AT_MOST),
        ("read 10", "reads 64 MiB 10 times a second", STEPS_AT_MOST),
        ("ask", "asks without a pause", 0.0),
        ("read", "reads without a pause", 0.0),
    ):
        name = f"the engine's steps beside a peer that {does}, to without"
        yield _figure(bench, name, "steps", way, "step_to_still", at_most=target)
        for path, what in (("decode", "steps that decode"), ("prefill", "a step that computes a prompt")):
            yield _figure(bench, f"the same, {what}", "steps", way, f"{path}_to_still")
    for path, what in (("decode", "a step that decodes"), ("prefill", "a step that computes a prompt")):
        yield _figure(bench, f"{what}, without", "steps", "still", f"{path}_ms", unit="ms")


def _first_token() -> Iterator[Figure]:
    for mode in ("eager", "delayed"):
        name = f"{mode}: hit of 3,968 at a peer, to a hit in Mooncake Store"
        yield _figure("p2p_ttft", name, mode, "peer_to_mooncake", at_most=1.0)
        for path, what in (
            ("peer", "hit of 3,968 at a peer"),
            ("cpu", "the same hit from the CPU tier here"),
            ("own", "vLLM's own prefix hit"),
            ("cold", "the prompt computed"),
            ("mooncake", "the same hit in Mooncake Store"),
            ("mooncake_own", "vLLM's own prefix hit beside Mooncake"),
        ):
            yield _figure("p2p_ttft", f"{mode}: {what}", mode, "median_ms", path, unit="ms")
        for path, what in (
            ("peer_to_cpu", "hit at a peer to a hit here"),
            ("peer_to_own", "hit at a peer to vLLM's own prefix hit"),
            ("mooncake_to_own", "hit in Mooncake Store to vLLM's own prefix hit beside it"),
            ("cold_to_peer", "the prompt computed to a hit at a peer"),
        ):
            yield _figure("p2p_ttft", f"{mode}: {what}", mode, path)


P2P: Sequence[Figure] = (
    *_staging_copy(),
    *_delayed_pull(),
    *_lookup(),
    *_serving(),
    *_first_token(),
)
