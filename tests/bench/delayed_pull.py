"""A delayed pull, through two landing buffers, against reading first and filling the engine's blocks then.

Run ``python -m tests.bench.delayed_pull``. The holder is a process of its own with the local channel. Both
ways are the product's own: a load that passes through the landing buffers, and a pull into the first tier
with a load from there behind it. They take turns. A chunk has 16 KiB of KV cache per token.

Once over the local channel, which copies on one thread: with more it takes every core of a small machine,
and there is nothing to hide behind. Once over a link that is as fast as the engine's blocks can be filled,
and that takes no core from anybody, as a network card does: what it is told to read has come when it would
have come over such a link, one read after the other. Its bytes move only where they are looked at, which is
not timed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import queue
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Self

import numpy as np
from attrs import frozen

from kvferry.api import (
    Channel,
    ChannelContext,
    Connection,
    ItemResult,
    Region,
    RemoteOp,
    Ticket,
    TransferStatus,
)
from kvferry.control.grants import ARENA
from kvferry.control.orders import ItemFault
from kvferry.data.copy import choose_copier
from kvferry.data.engine_side import EngineGroup, EngineSide, PagePlane
from kvferry.data.mapping import create_region, region_view
from kvferry.data.mover import Mover
from kvferry.data.peer_side import LandingSetup, PeerSide
from kvferry.data.plans import Direction, PeerLoad, Transfer, TransferResult
from kvferry.data.private_memory import PrivateArena
from kvferry.data.wire import MeetPeer, OpenChannel, PullChunks
from kvferry.testing.channels import ForwardingChannel
from tests.bench.turns import gigabytes_per_second, speedup, take_turns, timed

CHUNK_TOKENS = 256
CHUNK_BYTES = 4 << 20
BUFFER_BYTES = 128 << 20
SIZES = (16, 64)
"""Chunks that are brought at once."""
ROUNDS = 15
SECONDS = 60.0
FAR = "far"


@frozen
class Shape:
    """K and V of so many layers, with so many bytes of each in a block."""

    layers: int
    page_bytes: int
    block_tokens: int

    @property
    def chunk_blocks(self) -> int:
        return CHUNK_TOKENS // self.block_tokens


COARSE = Shape(layers=8, page_bytes=128 << 10, block_tokens=128)
FINE = Shape(layers=32, page_bytes=4 << 10, block_tokens=16)


def run(rounds: int = ROUNDS, sizes: Sequence[int] = SIZES) -> dict[str, Any]:
    """By row ``<channel>, <n> chunks``: GB/s of both ways, and the median ratio. ``left_out`` says what was
    not measured and why."""
    if importlib.util.find_spec("kvferry_transport_local") is None:
        return {"left_out": {"everything": "kvferry-transport-local is not installed"}}
    results: dict[str, Any] = {"left_out": {}}
    with _holder(max(sizes)) as (export, epoch):
        for paced in (False, True):
            with _Near(max(sizes), FINE if paced else COARSE) as near:
                speed = near.scatter_speed(max(sizes))
                near.meet(export, epoch, speed if paced else None)
                for count in sizes:
                    seconds = take_turns(
                        {
                            "delayed": timed(partial(near.delayed, count)),
                            "one after the other": timed(partial(near.one_after_the_other, count)),
                        },
                        rounds,
                    )
                    near.check(count)
                    name = "as fast as the blocks are filled" if paced else "local"
                    results[f"{name}, {count} chunks"] = {
                        **gigabytes_per_second(seconds, count * CHUNK_BYTES),
                        "to one after the other": speedup(seconds, "delayed", "one after the other"),
                    }
                results[f"filling {near.shape.page_bytes >> 10} KiB pages GB/s"] = speed / 1e9
    return results


class PacedChannel(ForwardingChannel):
    """Reads end when a link of so many bytes a second has brought them, one after the other. Bytes come only
    while it ``moves``."""

    moves = False

    def __init__(self, inner: Channel, speed: float) -> None:
        super().__init__(inner)
        self._speed = speed
        self._reads: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._free_at = 0.0

    def open(self, context: ChannelContext) -> None:
        super().open(context)
        self._thread.start()

    def close(self, deadline: float) -> None:
        super().close(deadline)
        self._reads.put(None)
        self._thread.join()

    def read(
        self, connection: Connection, operations: Sequence[RemoteOp], deadline: float
    ) -> Ticket[TransferStatus]:
        outer: Ticket[TransferStatus] = Ticket(len(operations))
        begin = partial(super().read, connection, operations, deadline)
        length = sum(each.local.length for each in operations)
        self._reads.put(partial(self._pace, outer, begin, length, time.perf_counter()))
        return outer

    def _run(self) -> None:
        while (read := self._reads.get()) is not None:
            read()

    def _pace(
        self,
        outer: Ticket[TransferStatus],
        begin: Callable[[], Ticket[TransferStatus]],
        length: int,
        handed: float,
    ) -> None:
        # A read that was handed over while the one before was under way begins when that has ended.
        self._free_at = max(self._free_at, handed) + length / self._speed
        results = [ItemResult(TransferStatus.DONE)] * outer.items
        if self.moves:
            inner = begin()
            inner.wait(SECONDS)
            results = list(inner.results)
        time.sleep(max(0.0, self._free_at - time.perf_counter()))
        outer.complete(results)


class _Near:
    """One rank that reads, and the memory of an engine."""

    def __init__(self, chunks: int, shape: Shape) -> None:
        self.chunks = chunks
        self.shape = shape
        self._speed: float | None = None
        self._link: PacedChannel | None = None
        self._heard: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._number = 0

    def __enter__(self) -> Self:
        shape = self.shape
        blocks = 1 + self.chunks * shape.chunk_blocks
        self._pages = np.zeros((2 * shape.layers, blocks, shape.page_bytes), np.uint8)
        self._pages[:] = 1  # touched
        planes = [
            PagePlane(
                layer=f"layer{number // 2}",
                address=self._pages[number].ctypes.data,
                stride=shape.page_bytes,
                page_bytes=shape.page_bytes,
                blocks=blocks,
                keep_alive=self._pages,
            )
            for number in range(2 * shape.layers)
        ]
        engine = EngineSide(
            [EngineGroup(block_tokens=shape.block_tokens, planes=tuple(planes))], CHUNK_TOKENS
        )
        # Any block but 0, in no order, as an engine's tables are after a while.
        self._blocks = (1 + np.random.default_rng(5).permutation(blocks - 1)).tolist()
        self._file = create_region("first", self.chunks * CHUNK_BYTES)
        self._file.__enter__()
        region_view(self._file.region)[:] = 1
        copier = choose_copier().copier
        self._mover = Mover(engine, self._file.region, copier, lambda _transfer, _result: None)
        setup = LandingSetup(capacity=BUFFER_BYTES, make_arena=PrivateArena, copier=copier)
        self._side = PeerSide(
            "local",
            self._make_channel,
            engine,
            CHUNK_TOKENS,
            rank=0,
            world_size=1,
            retry_seconds=1.0,
            landing=setup,
        )
        self._side.start(self._file.region, self)
        return self

    def __exit__(self, *_: object) -> None:
        if not self._side.stop(SECONDS):
            raise RuntimeError("the channel does not end")
        self._file.__exit__(None, None, None)

    def _make_channel(self) -> Channel:
        channel = _channel()
        if self._speed is not None:
            channel = self._link = PacedChannel(channel, self._speed)
        return channel

    def meet(self, export: bytes, epoch: bytes, speed: float | None) -> None:
        """The channel is slowed down to ``speed`` bytes a second."""
        self._epoch, self._speed = epoch, speed
        self._side.take(OpenChannel("near", os.urandom(16)))
        self._heard.get(timeout=SECONDS)
        self._side.take(MeetPeer(FAR, epoch, export))

    # -- both ways -----------------------------------------------------------------------------------

    def delayed(self, count: int) -> None:
        load = PeerLoad(
            transfer=self._transfer(count),
            peer=FAR,
            epoch=self._epoch,
            region=ARENA,
            slots=_slots(count),
            tokens=(CHUNK_TOKENS,) * count,
            deadline=time.monotonic() + SECONDS,
            seconds=SECONDS,
        )
        self._side.load(load, load.deadline, self._heard.put)
        self._ended()

    def one_after_the_other(self, count: int) -> None:
        transfer = self._transfer(count)
        self._side.take(
            PullChunks(
                id=transfer.id,
                peer=FAR,
                epoch=self._epoch,
                digests=(bytes(32),) * count,
                tokens=(CHUNK_TOKENS,) * count,
                from_slots=_slots(count),
                slots=tuple(range(count)),
                deadline=time.monotonic() + SECONDS,
            )
        )
        self._ended()
        self._heard.put(self._mover.run_now(transfer))
        self._ended()

    def scatter_speed(self, count: int) -> float:
        """Bytes a second with which the engine's blocks are filled out of memory of this process."""
        filled = timed(lambda: self._heard.put(self._mover.run_now(self._transfer(count))))
        times = []
        for _ in range(ROUNDS):
            times.append(filled())
            self._ended()
        return count * CHUNK_BYTES / statistics.median(times)

    def check(self, count: int) -> None:
        """The holder has the number of its slot in each byte of it."""
        self._pages[:] = 255
        if self._link is not None:
            self._link.moves = True
        self.delayed(count)
        if self._link is not None:
            self._link.moves = False
        for number, slot in enumerate(_slots(count)):
            blocks = self.shape.chunk_blocks
            for block in self._blocks[number * blocks : (number + 1) * blocks]:
                if not (self._pages[:, block] == slot).all():
                    raise RuntimeError(f"block {block} does not hold what is in slot {slot} of the peer")

    def _transfer(self, count: int) -> Transfer:
        self._number += 1
        blocks = self.shape.chunk_blocks
        rows = range(count * blocks)
        return Transfer.of(
            self._number,
            "request",
            Direction.LOAD,
            [row // blocks for row in rows],
            [row % blocks for row in rows],
            [self._blocks[: len(rows)]],
        )

    def _ended(self) -> None:
        heard = self._heard.get(timeout=SECONDS)
        if not isinstance(heard, TransferResult) or heard.failed_slots:
            raise RuntimeError(f"a read failed: {heard}")

    # -- what it hears -------------------------------------------------------------------------------

    def channel_opened(self, epoch: bytes, export: bytes, shard: bytes, slot_bytes: int) -> None:
        self._heard.put(export)

    def channel_closed(self, epoch: bytes, reason: str) -> None:
        if reason:
            self._heard.put(reason)

    def filled(self, slots: Collection[int]) -> None:
        pass

    def done(self, order: int, faults: dict[int, ItemFault], reason: str) -> None:
        self._heard.put(TransferResult(order, tuple(faults), reason))


def _slots(count: int) -> tuple[int, ...]:
    """Where the peer has the chunks."""
    return tuple(np.random.default_rng(7).permutation(count).tolist())


def _channel() -> Channel:
    from kvferry_transport_local.channel import LocalChannel
    from kvferry_transport_local.options import LocalOptions

    return LocalChannel(LocalOptions(threads=1))


@contextmanager
def _holder(chunks: int) -> Iterator[tuple[bytes, bytes]]:
    command = [sys.executable, "-m", "tests.bench.delayed_pull", "holder", str(chunks)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        try:
            told = json.loads(process.stdout.readline())
            yield bytes.fromhex(told["export"]), bytes.fromhex(told["epoch"])
        finally:
            process.stdin.close()
            process.wait()


def _be_holder(chunks: int) -> None:
    """Have memory until the standard input ends."""
    epoch = os.urandom(16)
    with create_region(ARENA, chunks * CHUNK_BYTES) as file:
        region_view(file.region).reshape(chunks, -1)[:] = np.arange(chunks, dtype=np.uint8)[:, None]
        channel = _channel()
        channel.open(ChannelContext(name="local", instance=FAR, epoch=epoch))
        channel.register(Region(name=ARENA, address=file.region.address, length=file.region.length))
        print(json.dumps({"export": channel.export().hex(), "epoch": epoch.hex()}), flush=True)
        sys.stdin.read()
        channel.close(time.monotonic() + SECONDS)


if __name__ == "__main__":
    if sys.argv[1:2] == ["holder"]:
        _be_holder(int(sys.argv[2]))
    else:
        print(json.dumps(run(), indent=1))
