"""The local channel against memcpy: 1 MiB spans between two processes, in either direction.

Run ``python -m tests.bench.local_channel``. The peer is a process of its own. Channel and memcpy take turns,
and who begins changes from round to round; a ratio is the median over the rounds. Both have the same number
of threads, one and two. The memory is larger than the caches, and all of it was touched before: memory files
where it is mapped, and memory without one, as NumPy and torch allocate it, where it is read across processes.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from kvferry.api import ChannelContext, Region, RemoteOp, Span
from kvferry.data.mapping import create_region, region_view

SPAN_BYTES = 1 << 20
TOTAL_BYTES = 256 << 20
ROUNDS = 11
SECONDS = 60.0
NAME = "memory"
MECHANISMS = ("mapped", "cross-process")

Run = Callable[[], None]


def run() -> dict[str, Any]:
    """By row ``<mechanism> <verb>, <n> threads``: GB/s of the channel and of memcpy, and the median ratio.
    ``left_out`` says what was not measured and why."""
    if importlib.util.find_spec("kvferry_transport_local") is None:
        return {"left_out": {"everything": "kvferry-transport-local is not installed"}}
    from kvferry_transport_local.moving import choose_movement

    results: dict[str, Any] = {"copies": choose_movement().why, "left_out": {}}
    for threads in (1, 2):
        if threads > len(os.sched_getaffinity(0)):
            results["left_out"][f"{threads} threads"] = "this machine has fewer processors"
            continue
        for mechanism in MECHANISMS:
            for verb in ("read", "write"):
                results[f"{mechanism} {verb}, {threads} threads"] = _compare(mechanism, verb, threads)
    return results


def _compare(mechanism: str, verb: str, threads: int) -> dict[str, float]:
    order = np.random.default_rng(5).permutation(TOTAL_BYTES // SPAN_BYTES).tolist()
    with (
        _peer(mechanism, threads) as export,
        _memory(mechanism, 1) as ours,
        _memory(mechanism, 2) as theirs,
        _moves(mechanism, verb, threads, export, ours, order) as move,
    ):
        return _take_turns(move, _memcpy(ours, theirs, order, threads))


@contextmanager
def _memory(mechanism: str, byte: int) -> Iterator[Region]:
    if mechanism == "cross-process":
        memory = np.full(TOTAL_BYTES, byte, np.uint8)
        yield Region(name=NAME, address=memory.ctypes.data, length=TOTAL_BYTES, keep_alive=memory)
        return
    with create_region(NAME, TOTAL_BYTES) as file:
        region_view(file.region)[:] = byte
        yield file.region


def _take_turns(move: Run, copy: Run) -> dict[str, float]:
    seconds: dict[str, list[float]] = {"channel": [], "memcpy": []}
    runs = {"channel": move, "memcpy": copy}
    for name in runs:  # page tables, threads, caches
        runs[name]()
    for turn in range(ROUNDS):
        for name in sorted(runs, reverse=turn % 2 == 1):
            began = time.perf_counter()
            runs[name]()
            seconds[name].append(time.perf_counter() - began)
    ratios = [there / here for here, there in zip(seconds["channel"], seconds["memcpy"], strict=True)]
    figures = {f"{name} GB/s": TOTAL_BYTES / statistics.median(each) / 1e9 for name, each in seconds.items()}
    return {**figures, "to memcpy": statistics.median(ratios)}


def _memcpy(to: Region, source: Region, order: list[int], threads: int) -> Run:
    """The C library's, span by span, without the interpreter's lock."""
    move = ctypes.CDLL(None).memmove
    move.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)

    def share(spans: list[tuple[int, int]]) -> None:
        for target, origin in spans:
            move(target, origin, SPAN_BYTES)

    spans = [
        (to.address + number * SPAN_BYTES, source.address + place * SPAN_BYTES)
        for number, place in enumerate(order)
    ]

    def run_once() -> None:
        helpers = [
            threading.Thread(target=share, args=(spans[number::threads],)) for number in range(1, threads)
        ]
        for helper in helpers:
            helper.start()
        share(spans[0::threads])
        for helper in helpers:
            helper.join()

    return run_once


@contextmanager
def _moves(
    mechanism: str, verb: str, threads: int, export: bytes, region: Region, order: list[int]
) -> Iterator[Run]:
    channel = _channel(mechanism, threads, "near")
    channel.register(region)
    connection = channel.connect(export, time.monotonic() + SECONDS)
    operations = [
        RemoteOp(Span(NAME, number * SPAN_BYTES, SPAN_BYTES), NAME, place * SPAN_BYTES)
        for number, place in enumerate(order)
    ]
    call = channel.read if verb == "read" else channel.write

    def run_once() -> None:
        ticket = call(connection, operations, time.monotonic() + SECONDS)
        if not ticket.wait(SECONDS) or any(result.error for result in ticket.results):
            raise RuntimeError(f"the channel failed: {ticket.results[0].error}")

    try:
        yield run_once
    finally:
        channel.close(time.monotonic() + SECONDS)


@contextmanager
def _peer(mechanism: str, threads: int) -> Iterator[bytes]:
    command = [sys.executable, "-m", "tests.bench.local_channel", "peer", mechanism, str(threads)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        try:
            yield bytes.fromhex(process.stdout.readline().decode())
        finally:
            process.stdin.close()
            process.wait()


def _be_peer(mechanism: str, threads: int) -> None:
    """Have memory until the standard input ends."""
    channel = _channel(mechanism, threads, "far")
    with _memory(mechanism, 3) as region:
        channel.register(region)
        sys.stdout.write(channel.export().hex() + "\n")
        sys.stdout.flush()
        sys.stdin.read()
        channel.close(time.monotonic() + SECONDS)


def _channel(mechanism: str, threads: int, instance: str) -> Any:
    from kvferry_transport_local.channel import LocalChannel
    from kvferry_transport_local.options import LocalOptions, Mechanism

    channel = LocalChannel(LocalOptions(mechanism=Mechanism(mechanism), threads=threads))
    channel.open(ChannelContext(name="local", instance=instance, epoch=os.urandom(16)))
    return channel


if __name__ == "__main__":
    if sys.argv[1:2] == ["peer"]:
        _be_peer(sys.argv[2], int(sys.argv[3]))
    else:
        print(json.dumps(run(), indent=2))
