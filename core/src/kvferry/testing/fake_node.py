"""A process that holds manager, scheduler side and the tier's memory, and no engine.

``python -m kvferry.testing.fake_node SOCKET FOLDER SLOT_BYTES`` connects to the Unix socket, passes the
descriptor of its arena on, and then answers calls until the other side is gone. Every message is
MessagePack behind its length. The folder is where workers meet the scheduler side.
"""

from __future__ import annotations

import socket
import struct
import sys
import threading
from typing import Any

import msgspec

from kvferry.control.lru import LRU
from kvferry.control.manager import CacheManager
from kvferry.data.handover import send_fd
from kvferry.data.store_side import StoreSide
from kvferry.runtime import LoadMode, RequestOptions, RequestState, SchedulerRuntime
from kvferry.runtime.address import MeetingPlace
from kvferry.testing.backends import MemoryBackend, MemoryOptions
from kvferry.testing.fake_instance import InstanceSettings, key_chains

SETTINGS = InstanceSettings(slots=16)
BLOCK = SETTINGS.engine.block_tokens
CHUNK = SETTINGS.chunk_blocks * BLOCK
_LENGTH = struct.Struct("<I")


class Arena(msgspec.Struct):
    """What goes with the arena's descriptor."""

    length: int
    slots: int


def send(connection: socket.socket, message: object) -> None:
    encoded = msgspec.msgpack.encode(message)
    connection.sendall(_LENGTH.pack(len(encoded)) + encoded)


def receive(connection: socket.socket) -> bytes:
    """The next message; empty when the other side is gone."""
    head = _exactly(connection, _LENGTH.size)
    if not head:
        return b""
    (length,) = _LENGTH.unpack(head)
    return _exactly(connection, length)


def _exactly(connection: socket.socket, count: int) -> bytes:
    parts = b""
    while len(parts) < count:
        part = connection.recv(count - len(parts))
        if not part:
            return b""
        parts += part
    return parts


class Node:
    """Answers calls for the scheduler side. Tokens come with each call, as far as they are new."""

    def __init__(self, runtime: SchedulerRuntime) -> None:
        self._runtime = runtime
        self._tokens: dict[str, list[int]] = {}
        self._new_chain = key_chains(SETTINGS)

    def call(self, name: str, request_id: str, more_tokens: list[int], arguments: list[Any]) -> Any:
        self._tokens.setdefault(request_id, []).extend(more_tokens)
        if name == "add_request":
            return self._add(request_id, *arguments)
        if name == "step_plan":
            return self._runtime.step_plan(arguments[0])
        if name == "scheduled":
            computed, blocks, replace, known, before = arguments
            return self._runtime.scheduled(
                request_id,
                computed,
                blocks,
                replace_blocks=replace,
                known_tokens=known,
                computed_before=before,
            )
        if name == "statistics":
            totals, manager = self._runtime.statistics()
            return [totals.loaded_tokens, manager.resident, manager.leases, manager.reservations]
        return getattr(self._runtime, name)(request_id, *arguments)

    def _add(self, request_id: str, salt: str, store: bool, load: bool) -> None:
        tokens = self._tokens[request_id]
        self._runtime.add_request(
            RequestState(
                id=request_id,
                tokens=tokens,
                prompt_tokens=len(tokens),
                chain=self._new_chain(salt, None),
                salt=salt,
                options=RequestOptions(store=store, load=load),
            )
        )


def main(path: str, folder: str, slot_bytes: int) -> None:
    """Live until the other side of the socket is gone."""
    store = StoreSide("memory", MemoryBackend(MemoryOptions(), SETTINGS.slots * slot_bytes), slot_bytes, 0)
    ready = threading.Event()
    region = store.open(ready.set)
    while store.ready_slots() < store.slots:
        ready.wait(10.0)
        ready.clear()
    manager = CacheManager(
        capacity=store.slots,
        chunk_tokens=CHUNK,
        block_tokens=BLOCK,
        policy=LRU(),
        lease_seconds=60.0,
        write_seconds=60.0,
    )
    runtime = SchedulerRuntime(
        manager,
        MeetingPlace("node", folder, {}),
        world_size=1,
        fingerprint="fake",
        chunk_tokens=CHUNK,
        groups=SETTINGS.shapes,
        load_mode=LoadMode.ASYNC,
        save_generated=True,
    )
    runtime.open()
    node = Node(runtime)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        send_fd(connection, region.fd, msgspec.msgpack.encode(Arena(region.length, store.slots)))
        while message := receive(connection):
            send(connection, node.call(*msgspec.msgpack.decode(message)))
    runtime.close()
    store.close()
    manager.check()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
