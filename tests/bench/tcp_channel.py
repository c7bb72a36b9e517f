"""The TCP channel against bare sockets: 1 MiB spans between two processes over loopback, in either direction.

Run ``python -m tests.bench.tcp_channel``. The peer is a process of its own. The baseline moves the same spans
with ``sendall`` and ``recv_into`` alone, over as many connections, each with a thread on both sides. Channel
and baseline take turns, and who begins changes from round to round; a ratio is the median over the rounds.
Also the time of a single small read, and operations per second of a large batch of them.

Mooncake's TCP transfer engine and NIXL's UCX backend over TCP move the same spans in the same order between
two processes of their own each, in turns with the channel. They are installed into environments of their own,
once.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kvferry.api import Channel, ChannelContext, Connection, Region, RemoteOp, Span
from kvferry.data.mapping import MappedRegion, create_region, region_view
from tests.bench.environments import CACHE, PackageMissing
from tests.bench.transfer_engines import MOONCAKE, NIXL_TCP, Moving, moving
from tests.bench.turns import Run, gigabytes_per_second, speedup, take_turns, timed

SPAN_BYTES = 1 << 20
TOTAL_BYTES = 128 << 20
SMALL_BYTES = 4096
SMALL_COUNT = 8192
ROUNDS = 15
LANES = (1, 2, 4)
SECONDS = 60.0
NAME = "memory"

_COMMAND = struct.Struct("<BI")
"""What the bare peer is asked for: 1 to send, 0 to receive; the first span."""


def run(lanes: tuple[int, ...] = LANES, rounds: int = ROUNDS, cache: Path = CACHE) -> dict[str, Any]:
    """By row ``<verb>, <n> connections``: GB/s of channel and bare sockets, and the median ratio; in rows
    ``<verb> beside other engines`` those, which are installed below ``cache``. ``left_out`` says what was not
    measured and why."""
    if importlib.util.find_spec("kvferry_transport_tcp") is None:
        return {"left_out": {"everything": "kvferry-transport-tcp is not installed"}}
    results: dict[str, Any] = {"left_out": {}}
    for count in lanes:
        with _sides(count) as (channel, connection, memory, bare):
            for verb in ("read", "write"):
                runs = {
                    "channel": timed(_large(channel, connection, verb)),
                    "bare": timed(_bare(bare, verb, memory)),
                }
                seconds = take_turns(runs, rounds)
                results[f"{verb}, {count} connections"] = {
                    **gigabytes_per_second(seconds, TOTAL_BYTES),
                    "to bare sockets": speedup(seconds, "channel", "bare"),
                }
            results[f"small, {count} connections"] = _small(channel, connection)
    return _beside_other_engines(results, lanes[-1], rounds, cache)


def _beside_other_engines(results: dict[str, Any], lanes: int, rounds: int, cache: Path) -> dict[str, Any]:
    with ExitStack() as stack:
        engines: dict[str, Moving] = {}
        for name, engine in (("Mooncake", MOONCAKE), ("NIXL", NIXL_TCP)):
            try:
                engines[name] = stack.enter_context(moving(engine, cache, TOTAL_BYTES, SPAN_BYTES))
            except PackageMissing as missing:
                results["left_out"][name] = str(missing)
        if not engines:
            return results
        channel, connection, _, _ = stack.enter_context(_sides(lanes))
        for verb in ("read", "write"):
            runs = {name: partial(engine.move, verb) for name, engine in engines.items()}
            seconds = take_turns({"channel": timed(_large(channel, connection, verb)), **runs}, rounds)
            results[f"{verb} beside other engines"] = {
                **gigabytes_per_second(seconds, TOTAL_BYTES),
                **{f"to {name}": speedup(seconds, "channel", name) for name in engines},
            }
    return results


def _large(channel: Channel, connection: Connection, verb: str) -> Run:
    order = np.random.default_rng(5).permutation(TOTAL_BYTES // SPAN_BYTES).tolist()
    operations = [
        RemoteOp(Span(NAME, number * SPAN_BYTES, SPAN_BYTES), NAME, place * SPAN_BYTES)
        for number, place in enumerate(order)
    ]
    return lambda: _move(channel, connection, verb, operations)


def _move(channel: Channel, connection: Connection, verb: str, operations: list[RemoteOp]) -> None:
    call = channel.read if verb == "read" else channel.write
    ticket = call(connection, operations, time.monotonic() + SECONDS)
    if not ticket.wait(SECONDS) or any(result.error for result in ticket.results):
        raise RuntimeError(f"the channel failed: {ticket.results[0].error}")


def _small(channel: Channel, connection: Connection) -> dict[str, float]:
    one = [RemoteOp(Span(NAME, 0, SMALL_BYTES), NAME, 0)]
    many = [
        RemoteOp(Span(NAME, n * SMALL_BYTES, SMALL_BYTES), NAME, n * SMALL_BYTES) for n in range(SMALL_COUNT)
    ]
    singles = []
    for _ in range(300):
        began = time.perf_counter()
        _move(channel, connection, "read", one)
        singles.append(time.perf_counter() - began)
    batches = []
    for _ in range(5):
        began = time.perf_counter()
        _move(channel, connection, "read", many)
        batches.append(time.perf_counter() - began)
    return {
        "one 4 KiB read, us": statistics.median(singles) * 1e6,
        "4 KiB reads in a batch, 1/s": SMALL_COUNT / statistics.median(batches),
    }


# -- bare sockets --------------------------------------------------------------------------------------


def _bare(sockets: list[socket.socket], verb: str, memory: memoryview) -> Run:
    spans = range(TOTAL_BYTES // SPAN_BYTES)

    def share(sock: socket.socket, number: int) -> None:
        mine = spans[number :: len(sockets)]
        sock.sendall(_COMMAND.pack(verb == "read", number) + struct.pack("<I", len(sockets)))
        for place in mine:
            view = memory[place * SPAN_BYTES : (place + 1) * SPAN_BYTES]
            if verb == "read":
                _receive(sock, view)
            else:
                sock.sendall(view)
        if verb == "write":
            sock.recv(1)

    def run_once() -> None:
        threads = [threading.Thread(target=share, args=(sock, n)) for n, sock in enumerate(sockets)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return run_once


def _receive(sock: socket.socket, view: memoryview) -> None:
    while view:
        received = sock.recv_into(view, 0, socket.MSG_WAITALL)
        if not received:
            raise EOFError
        view = view[received:]


def _serve_bare(sock: socket.socket, memory: memoryview) -> None:
    command = memoryview(bytearray(_COMMAND.size + 4))
    try:
        while True:
            _receive(sock, command)
            sends, first = _COMMAND.unpack_from(command)
            (step,) = struct.unpack_from("<I", command, _COMMAND.size)
            for place in range(first, TOTAL_BYTES // SPAN_BYTES, step):
                view = memory[place * SPAN_BYTES : (place + 1) * SPAN_BYTES]
                if sends:
                    sock.sendall(view)
                else:
                    _receive(sock, view)
            if not sends:
                sock.sendall(b".")
    except (EOFError, OSError):
        sock.close()


# -- both sides ----------------------------------------------------------------------------------------


@contextmanager
def _open(name: str, connections: int) -> Iterator[tuple[Channel, MappedRegion]]:
    from kvferry_transport_tcp.channel import TCPChannel
    from kvferry_transport_tcp.options import TCPOptions

    with create_region(name, TOTAL_BYTES) as mapped:
        region_view(mapped.region)[:] = 1
        channel = TCPChannel(TCPOptions(connections=connections))
        channel.open(ChannelContext(name="tcp", instance=name, epoch=os.urandom(16)))
        channel.register(Region(name=NAME, address=mapped.region.address, length=TOTAL_BYTES))
        try:
            yield channel, mapped
        finally:
            channel.close(time.monotonic() + SECONDS)


@contextmanager
def _sides(
    connections: int,
) -> Iterator[tuple[Channel, Connection, memoryview, list[socket.socket]]]:
    command = [sys.executable, "-m", "tests.bench.tcp_channel", "peer", str(connections)]
    with ExitStack() as stack:
        process = stack.enter_context(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        )
        assert process.stdout is not None
        assert process.stdin is not None
        stack.callback(process.stdin.close)
        told = json.loads(process.stdout.readline())
        channel, mapped = stack.enter_context(_open("near", connections))
        connection = channel.connect(bytes.fromhex(told["export"]), time.monotonic() + SECONDS)
        sockets = []
        for _ in range(connections):
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", told["port"])))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sockets.append(sock)
        yield channel, connection, region_view(mapped.region).data, sockets


def _be_peer(connections: int) -> None:
    """Have memory until the standard input ends."""
    with _open("far", connections) as (channel, mapped), socket.create_server(("127.0.0.1", 0)) as server:
        told = {"export": channel.export().hex(), "port": server.getsockname()[1]}
        print(json.dumps(told), flush=True)
        memory = region_view(mapped.region).data
        threads = []
        for _ in range(connections):
            sock, _ = server.accept()
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threads.append(threading.Thread(target=_serve_bare, args=(sock, memory)))
            threads[-1].start()
        sys.stdin.read()
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    if sys.argv[1:2] == ["peer"]:
        _be_peer(int(sys.argv[2]))
    else:
        print(json.dumps(run(), indent=2))
