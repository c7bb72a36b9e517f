"""A real vLLM publishes what becomes of kvferry's content; a subscriber rebuilds the chains."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq

from tests.demo.prompts import random_tokens
from tests.e2e.checks import assert_sized, live
from tests.e2e.conftest import Launch

CHUNK = 256

FIELDS = {
    "BlockStored": (
        *("block_hashes", "parent_block_hash", "token_ids", "block_size"),
        *("lora_id", "medium", "lora_name", "extra_keys"),
    ),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": (),
}


def named(event: dict[str, Any] | list[Any]) -> dict[str, Any]:
    """An event as an object with its kind. vLLM 0.23 sends a list that begins with it."""
    if isinstance(event, dict):
        return event
    kind, *values = event
    return {"type": kind, **dict(zip(FIELDS[kind], values, strict=False))}


class Subscriber:
    """What a router would know: parents and tokens by hash, of one medium."""

    def __init__(self, socket: zmq.Socket[bytes], medium: str) -> None:
        self._socket = socket
        self._medium = medium
        self.parents: dict[Any, Any] = {}
        self.tokens: dict[Any, tuple[int, ...]] = {}
        self.names: set[str | None] = set()

    def listen(self, enough: Callable[[], bool], step: Callable[[], object], seconds: float = 60.0) -> None:
        """Apply events, letting the engine step in between, until it is ``enough``."""
        deadline = time.monotonic() + seconds
        while not enough():
            assert time.monotonic() < deadline, "the events did not come"
            step()
            while self._socket.poll(200):
                *_, payload = self._socket.recv_multipart()
                # [timestamp, events, rank]
                for event in msgspec.msgpack.decode(payload)[1]:
                    self._apply(named(event))

    def _apply(self, event: dict[str, Any]) -> None:
        if event.get("medium") != self._medium:
            return
        if event["type"] == "BlockRemoved":
            for block in event["block_hashes"]:
                del self.parents[block]
            return
        parent = event["parent_block_hash"]
        size, tokens = event["block_size"], event["token_ids"]
        assert size == CHUNK
        assert len(tokens) == size * len(event["block_hashes"])
        for number, block in enumerate(event["block_hashes"]):
            assert parent is None or parent in self.parents, "a child came before its parent"
            assert block not in self.parents, "it was stored already"
            self.parents[block] = parent
            self.tokens[block] = tuple(tokens[number * size : (number + 1) * size])
            parent = block

    def longest(self, prompt: list[int]) -> int:
        """Tokens of the longest run of chunks from the start."""
        at = None
        for start in range(0, len(prompt) - CHUNK + 1, CHUNK):
            wanted = tuple(prompt[start : start + CHUNK])
            found = [
                block
                for block, parent in self.parents.items()
                if parent == at and self.tokens[block] == wanted
            ]
            if not found:
                return start
            (at,) = found
        return len(prompt) // CHUNK * CHUNK


def test_published_parents_form_true_chains_and_an_operator_sees_and_clears_them(
    launch: Launch, runtime_dir: Path, small_model: Path
) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="kvf-") as folder,
        zmq.Context() as context,
        context.socket(zmq.SUB) as socket,
    ):
        endpoint = f"ipc://{folder}/events"
        described = launch(
            kv_events_config={"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint}
        )
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.connect(endpoint)
        index = Subscriber(socket, "CPU")
        with described as engine:
            prompt = random_tokens(1, 4 * CHUNK + 40)
            engine.serve(prompt[: 2 * CHUNK + 10])
            # Its first two chunks are there by now: the next one's parent is the second of them.
            engine.serve(prompt, {"kvferry.pin": {"name": "mine", "for": "1h"}})
            other = prompt[:CHUNK] + random_tokens(2, 2 * CHUNK)
            engine.serve(other, {"kvferry.ttl": "10min"})
            index.listen(
                lambda: (index.longest(prompt), index.longest(other)) == (4 * CHUNK, 3 * CHUNK), engine.settle
            )
            assert sorted(parent is None for parent in index.parents.values()) == [*[False] * 5, True]

            (row,) = live(runtime_dir, "list")["instances"]
            assert row["alive"]
            status = live(runtime_dir, "status")
            assert status["workers_ready"]
            assert_sized(small_model, runtime_dir)
            assert status["numbers"]["resident"] >= 6
            (pin,) = live(runtime_dir, "pins", "list")["pins"]
            assert pin["name"] == "mine"
            assert status["numbers"]["pinned"] == pin["chunks"] >= 4

            assert live(runtime_dir, "clear", "--salt", "nobody's")["removed"] == 0
            assert live(runtime_dir, "clear", "--tier", "cpu")["removed"] == status["numbers"]["resident"]
            index.listen(lambda: not index.parents, engine.settle)
            counters = engine.reset()
            assert counters["resident_chunks"] == counters["pinned_slots"] == 0
            assert engine.serve(prompt).cached_tokens == 0
