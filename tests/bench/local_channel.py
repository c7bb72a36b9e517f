"""The local channel against memcpy: 1 MiB spans between two processes, in either direction.

Run ``python -m tests.bench.local_channel``. The peer is a process of its own. Channel and memcpy take turns,
and who begins changes from round to round; a ratio is the median over the rounds. Both have the same number
of threads, one and two. The memory is larger than the caches, and all of it was touched before: memory files
where it is mapped, and memory without one, as NumPy and torch allocate it, where it is read across processes.

NIXL's UCX backend moves the same spans in the same order between two processes of its own, in turns with the
channel on one thread. It is installed into an environment of its own, once.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kvferry.api import ChannelContext, Region, RemoteOp, Span
from kvferry.data.mapping import create_region, region_view
from tests.bench.environments import CACHE, PackageMissing
from tests.bench.memcpy import memcpy
from tests.bench.transfer_engines import NIXL, moving
from tests.bench.turns import Run, gigabytes_per_second, speedup, take_turns, timed

SPAN_BYTES = 1 << 20
TOTAL_BYTES = 256 << 20
ROUNDS = 11
SECONDS = 60.0
NAME = "memory"
THREADS = (1, 2)
MECHANISMS = ("mapped", "cross-process")


def run(cache: Path = CACHE) -> dict[str, Any]:
    """By row ``<mechanism> <verb>, <n> threads``: GB/s of the channel and of memcpy, and the median ratio;
    in rows ``<verb> beside NIXL`` both mechanisms and NIXL, which is installed below ``cache``.
    ``left_out`` says what was not measured and why."""
    if importlib.util.find_spec("kvferry_transport_local") is None:
        return {"left_out": {"everything": "kvferry-transport-local is not installed"}}
    from kvferry_transport_local.moving import choose_movement

    results: dict[str, Any] = {"copies": choose_movement().why, "left_out": {}}
    for threads in THREADS:
        if threads > len(os.sched_getaffinity(0)):
            results["left_out"][f"{threads} threads"] = "this machine has fewer processors"
            continue
        for mechanism in MECHANISMS:
            for verb in ("read", "write"):
                results[f"{mechanism} {verb}, {threads} threads"] = _compare(mechanism, verb, threads)
    try:
        results |= _beside_nixl(cache)
    except PackageMissing as missing:
        results["left_out"]["NIXL"] = str(missing)
    return results


def _beside_nixl(cache: Path) -> dict[str, dict[str, float]]:
    order = _order()
    results = {}
    with ExitStack() as stack:
        nixl = stack.enter_context(moving(NIXL, cache, TOTAL_BYTES, SPAN_BYTES))
        memories = {each: stack.enter_context(_memory(each, 1)) for each in MECHANISMS}
        for threads in THREADS:
            exports = {each: stack.enter_context(_peer(each, threads)) for each in MECHANISMS}
            for verb in ("read", "write"):
                with ExitStack() as turn:
                    ours = {
                        each: timed(
                            turn.enter_context(
                                _moves(each, verb, threads, exports[each], memories[each], order)
                            )
                        )
                        for each in MECHANISMS
                    }
                    seconds = take_turns({**ours, "NIXL": partial(nixl.move, verb)}, ROUNDS)
                results[f"{verb} beside NIXL, {threads} threads"] = {
                    **gigabytes_per_second(seconds, TOTAL_BYTES),
                    **{f"{each} to NIXL": speedup(seconds, each, "NIXL") for each in MECHANISMS},
                }
    return results


def _compare(mechanism: str, verb: str, threads: int) -> dict[str, float]:
    order = _order()
    with (
        _peer(mechanism, threads) as export,
        _memory(mechanism, 1) as ours,
        _memory(mechanism, 2) as theirs,
        _moves(mechanism, verb, threads, export, ours, order) as move,
    ):
        runs = {"channel": timed(move), "memcpy": timed(_memcpy(ours, theirs, order, threads))}
        seconds = take_turns(runs, ROUNDS)
        return {
            **gigabytes_per_second(seconds, TOTAL_BYTES),
            "to memcpy": speedup(seconds, "channel", "memcpy"),
        }


def _order() -> list[int]:
    order: list[int] = np.random.default_rng(5).permutation(TOTAL_BYTES // SPAN_BYTES).tolist()
    return order


@contextmanager
def _memory(mechanism: str, byte: int) -> Iterator[Region]:
    if mechanism == "cross-process":
        memory = np.full(TOTAL_BYTES, byte, np.uint8)
        yield Region(name=NAME, address=memory.ctypes.data, length=TOTAL_BYTES, keep_alive=memory)
        return
    with create_region(NAME, TOTAL_BYTES) as file:
        region_view(file.region)[:] = byte
        yield file.region


def _memcpy(to: Region, source: Region, order: list[int], threads: int) -> Run:
    copies = [
        (to.address + number * SPAN_BYTES, source.address + place * SPAN_BYTES, SPAN_BYTES)
        for number, place in enumerate(order)
    ]
    return memcpy(copies, threads)


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
