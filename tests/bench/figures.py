"""The figures that the project holds itself to, and where each bench says them."""

from __future__ import annotations

from collections.abc import Sequence

from tests.bench.figure import Figure, Goal, Verdict
from tests.bench.p2p_figures import CHANNELS, P2P

__all__ = ["DISK", "FIGURES", "Figure", "Goal", "Verdict"]


def _copy(direction: str, page: str, target: float) -> Figure:
    return Figure(
        bench="copy",
        name=f"{direction}, {page} pages, to memcpy",
        path=("copies", f"{direction} {page}", "native ratio"),
        goal=Goal.AT_LEAST,
        target=target,
    )


def _disk(name: str, *path: str, unit: str = "", at_least: float = 0.0, at_most: float = 0.0) -> Figure:
    goal = Goal.AT_LEAST if at_least else Goal.AT_MOST if at_most else Goal.NONE
    return Figure(bench="disk", name=name, path=path, unit=unit, goal=goal, target=at_least or at_most)


_AT_DISK = ("1 MiB, 8 at the disk",)
_UNTOLD = ("1 MiB, 8 not acknowledged",)
DISK: Sequence[Figure] = (
    _disk("read of 8 MiB chunks", "8 MiB", "read", "kvferry GB/s", unit="GB/s"),
    _disk("the same, to fio with 32 under way", "8 MiB", "read", "to fio", at_least=0.9),
    _disk("durable write of 8 MiB chunks", "8 MiB", "write", "kvferry GB/s", unit="GB/s"),
    _disk(
        "the same, to fio with one flush at the end",
        *("8 MiB", "write", "to fio, one flush at the end"),
        at_least=0.8,
    ),
    _disk("the same, to fio where each is durable by itself", "8 MiB", "write", "to fio, each durable"),
    _disk("read of 1 MiB chunks, 8 at the disk, to fio", *_AT_DISK, "read", "to fio", at_least=0.8),
    _disk(
        "durable write of 1 MiB chunks, 8 at the disk, to fio where each is durable by itself",
        *(*_AT_DISK, "write", "to fio, each durable"),
        at_least=0.8,
    ),
    _disk("the same, to fio with one flush at the end", *_AT_DISK, "write", "to fio, one flush at the end"),
    _disk("read of 1 MiB chunks, 8 not acknowledged, to fio", *_UNTOLD, "read", "to fio"),
    _disk(
        "durable write of 1 MiB chunks, 8 not acknowledged, to fio where each is durable by itself",
        *(*_UNTOLD, "write", "to fio, each durable"),
    ),
    _disk("checksums, of the time to read 8 MiB chunks", "checksum", "of the time to read", at_most=0.1),
    _disk("checksums, of the time to write them", "checksum", "of the time to write", at_most=0.1),
    *(
        _disk(
            f"{mode} {direction} of 8 MiB chunks, to LMCache", "lmcache", mode, direction, "ratio", at_least=1
        )
        for mode in ("direct", "buffered")
        for direction in ("write", "read")
    ),
    *(
        _disk(
            f"{mode} read of slots that were used before, to LMCache", "lmcache", mode, "read again", "ratio"
        )
        for mode in ("direct", "buffered")
    ),
    _disk("memory per chunk: scheduler and rank", "restart", "bytes_per_chunk", unit="bytes", at_most=400.0),
    _disk("restart with 100,000 chunks, to the last header", "restart", "seconds", unit="s", at_most=2.0),
    _disk("taking them into the scheduler's index beside it", "restart", "index_seconds", unit="s"),
)


FIGURES: Sequence[Figure] = (
    *CHANNELS,
    *P2P,
    Figure(
        bench="directory_socket",
        name="controller with a million keys: finding 512, there and back",
        path=("find_512_in_the_clear_ms",),
        unit="ms",
        goal=Goal.AT_MOST,
        target=1.0,
    ),
    Figure(
        bench="directory_socket",
        name="the same with a shared secret",
        path=("find_512_with_secret_ms",),
        unit="ms",
        goal=Goal.AT_MOST,
        target=1.0,
    ),
    Figure(
        bench="directory_socket",
        name="keys told to it in the beginning",
        path=("told_keys_per_second_in_the_clear",),
        unit="keys/s",
        goal=Goal.AT_LEAST,
        target=50_000.0,
    ),
    Figure(
        bench="directory",
        name="directory of a million keys: changes",
        path=("changes_per_second",),
        unit="keys/s",
        goal=Goal.AT_LEAST,
        target=50_000.0,
    ),
    Figure(
        bench="directory",
        name="directory of a million keys: finding 512",
        path=("find_512_ms",),
        unit="ms",
        goal=Goal.AT_MOST,
        target=1.0,
    ),
    _copy("gather", "64 KiB", 0.9),
    _copy("scatter", "64 KiB", 0.9),
    _copy("gather", "4 KiB", 0.6),
    _copy("scatter", "4 KiB", 0.6),
    Figure(bench="copy", name="first touch of fresh memory", path=("first_touch_gb_per_s",), unit="GB/s"),
    Figure(
        bench="keys",
        name="keys of 131,072 tokens from scratch",
        path=("million_tokens_per_second", "keys from scratch, native packer", "median"),
        unit="M tokens/s",
        goal=Goal.AT_LEAST,
        target=40.0,
    ),
    Figure(
        bench="keys",
        name="the same without the native extension",
        path=("million_tokens_per_second", "keys from scratch, python packer", "median"),
        unit="M tokens/s",
    ),
    Figure(
        bench="keys",
        name="tokens hashed in a later turn with 1,024 new ones",
        path=("later_turn", "hashed_tokens"),
        unit="tokens",
        goal=Goal.AT_MOST,
        target=1024.0,
    ),
    Figure(
        bench="control",
        name="match of 512 chunks, 10,000 resident",
        path=("resident_10000", "match_ms"),
        unit="ms",
        goal=Goal.AT_MOST,
        target=0.25,
    ),
    Figure(
        bench="control",
        name="match of 512 chunks, 1,000,000 resident",
        path=("resident_1000000", "match_ms"),
        unit="ms",
        goal=Goal.AT_MOST,
        target=0.6,
    ),
    Figure(
        bench="control",
        name="Python memory per resident chunk",
        path=("bytes_per_chunk",),
        unit="bytes",
        goal=Goal.AT_MOST,
        target=500.0,
    ),
    *(
        Figure(
            bench="control",
            name=f"one hold of the lock: {what}",
            path=("holds", f"{kind}_us"),
            unit="µs",
            goal=Goal.AT_MOST,
            target=100.0,
        )
        for kind, what in (
            ("clear", "clearing"),
            ("scan", "looking for what to clear"),
            ("expire", "removing what has ended"),
            ("prolong", "letting a chain stay longer"),
            ("pin", "pinning"),
            ("unpin", "letting pinned chunks go"),
            ("tell", "telling of chunks again"),
            ("take_events", "taking facts"),
            ("quota_look", "looking who holds too much"),
            ("quota_evict", "enforcing a quota"),
        )
    ),
    *(
        Figure(
            bench="hit_ratio",
            name=f"{traffic}, tier of 5 % of the chunks: {policy}",
            path=("workloads", traffic, "hit_ratio", "5%", policy),
        )
        for traffic in ("chats", "rag", "scan")
        for policy in ("lru", "fifo", "mru", "lfu", "s3fifo", "isolated_lru", "optimum")
    ),
    Figure(
        bench="hooks",
        name="hook calls in 10,000 engine steps",
        path=("hook_calls",),
        goal=Goal.AT_MOST,
        target=0.0,
    ),
    *DISK,
    Figure(bench="ttft", name="cold, 4,001 tokens", path=("median_ms", "cold"), unit="ms"),
    Figure(bench="ttft", name="vLLM's own prefix hit of 3,968", path=("median_ms", "own"), unit="ms"),
    Figure(bench="ttft", name="kvferry hit of 3,968", path=("median_ms", "kvferry"), unit="ms"),
    Figure(
        bench="ttft",
        name="kvferry to own prefix hit",
        path=("kvferry_to_own",),
        goal=Goal.AT_MOST,
        target=1.2,
    ),
    Figure(bench="ttft", name="cold to kvferry", path=("cold_to_kvferry",), goal=Goal.AT_LEAST, target=20.0),
    Figure(bench="ttft", name="verify: kvferry to own prefix hit", path=("verify_to_own",)),
    Figure(
        bench="throughput",
        name="with the connector to without, no hits",
        path=("median_ratio",),
        goal=Goal.AT_LEAST,
        target=0.97,
    ),
    Figure(
        bench="throughput",
        name="its lower 95 % bound",
        path=("lower_95",),
        goal=Goal.AT_LEAST,
        target=0.95,
    ),
    Figure(bench="throughput", name="connector started first", path=("median_ratio_started_first",)),
    Figure(bench="throughput", name="connector started second", path=("median_ratio_started_second",)),
    Figure(
        bench="ssd_engine",
        name="hit of 3,968 from the CPU tier",
        path=("first_token", "median_ms", "cpu"),
        unit="ms",
    ),
    Figure(
        bench="ssd_engine",
        name="the same hit from the SSD",
        path=("first_token", "median_ms", "ssd"),
        unit="ms",
    ),
    Figure(
        bench="ssd_engine",
        name="reading its bytes with fio",
        path=("first_token", "median_ms", "raw"),
        unit="ms",
    ),
    Figure(
        bench="ssd_engine",
        name="from the SSD, to the CPU tier and the bytes at 0.8 of fio",
        path=("first_token", "ssd_to_allowed"),
        goal=Goal.AT_MOST,
        target=1.0,
    ),
    Figure(
        bench="ssd_engine",
        name="decode throughput while others load from the SSD, to without",
        path=("decoding", "throughput_to_without"),
        goal=Goal.AT_LEAST,
        target=0.95,
    ),
)
