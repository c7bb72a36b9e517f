"""The directory at a million keys: changes per second, lookups of 512 keys, memory per key.

Run ``python -m tests.bench.directory``.
"""

from __future__ import annotations

import gc
import hashlib
import statistics
import time
import tracemalloc
from typing import Any

from kvferry_sharing_p2p.directory.answers import DirectoryOptions, Registration, SyncState
from kvferry_sharing_p2p.directory.desk import Desk
from kvferry_sharing_p2p.directory.messages import (
    WIRE_VERSION,
    Answer,
    BeginAll,
    Changes,
    Codec,
    EndAll,
    Find,
    SomeOfAll,
)
from kvferry_sharing_p2p.directory.state import Directory

INSTANCES = 8
HOLDERS = 3
"""Instances that have each key."""
PROMPT_CHUNKS = 512
PART = 4096
BATCH = 1024
SPACE = b"n" * 32


def prompt_digests(number: int) -> bytes:
    """The digests of one prompt, one behind the other."""
    return b"".join(
        hashlib.blake2b(depth.to_bytes(4, "big"), digest_size=32, salt=number.to_bytes(8, "big")).digest()
        for depth in range(PROMPT_CHUNKS)
    )


class _Crowd:
    """Instances that publish to one directory, by frames as they come from a socket."""

    def __init__(self) -> None:
        self.desk = Desk(Directory(DirectoryOptions(), b"d" * 16, 0.0))
        self._codec = Codec()
        self.sessions: list[bytes] = []
        self._sequences = [0] * INSTANCES
        for number in range(INSTANCES):
            registration = self.desk.directory.register(
                f"i{number}", number.to_bytes(16, "big"), SPACE, 1, b"", 0.0
            )
            if not isinstance(registration, Registration):
                raise TypeError(registration.text)
            self.sessions.append(registration.session)
            self.send(number, BeginAll(session=registration.session, sequence=self.next(number)))

    def next(self, instance: int) -> int:
        self._sequences[instance] += 1
        return self._sequences[instance]

    def send(self, instance: int, message: BeginAll | SomeOfAll | EndAll | Changes) -> float:
        """Seconds from the frame to the answering frame."""
        frame = self._codec.encode(message)
        began = time.perf_counter()
        self.desk.answer(frame, 0.0)
        return time.perf_counter() - began

    def fill(self, prompts: int) -> list[float]:
        """Tell everything that all instances have; seconds of each message."""
        times = []
        for number in range(INSTANCES):
            session = self.sessions[number]
            own = [prompt for prompt in range(prompts) if (prompt - number) % INSTANCES < HOLDERS]
            for at in range(0, len(own), PART // PROMPT_CHUNKS):
                digests = b"".join(map(prompt_digests, own[at : at + PART // PROMPT_CHUNKS]))
                part = SomeOfAll(session=session, sequence=self.next(number), digests=digests)
                times.append(self.send(number, part))
            times.append(self.send(number, EndAll(session=session, sequence=self.next(number))))
        return times

    def find(self, digests: bytes, asker: str) -> tuple[float, Answer]:
        """Seconds from the frame to the answering frame, and the answer."""
        find = Find(version=WIRE_VERSION, id=1, asker=asker, namespace=SPACE, digests=digests, limit=3)
        frame = self._codec.encode(find)
        began = time.perf_counter()
        answer = self.desk.answer(frame, 0.0)
        seconds = time.perf_counter() - began
        if answer is None:
            raise RuntimeError("a find was not answered")
        message = self._codec.read_from_directory(answer, "directory")
        if not isinstance(message, Answer):
            raise TypeError(f"a find was answered by {message!r}")
        return seconds, message


def _lookups(crowd: _Crowd, prompts: int, rounds: int) -> list[float]:
    times = []
    for turn in range(rounds):
        # A stride that visits all parts of the table, so that no cache is warm by accident.
        prompt = turn * 7919 % prompts
        seconds, answer = crowd.find(prompt_digests(prompt), f"i{prompt % INSTANCES}")
        if answer.found.holders[0].chunks != PROMPT_CHUNKS or len(answer.found.holders) != HOLDERS - 1:
            raise RuntimeError(f"a prompt was not found: {answer.found}")
        times.append(seconds)
    return times


def _changes(crowd: _Crowd, prompts: int, rounds: int) -> list[float]:
    """Seconds of each batch: half of its keys are new, half go."""
    times = []
    for turn in range(rounds):
        number = turn % INSTANCES
        own = [prompt for prompt in range(prompts) if (prompt - number) % INSTANCES < HOLDERS]
        changes = Changes(
            session=crowd.sessions[number],
            sequence=crowd.next(number),
            added=prompt_digests(prompts + turn),
            removed=prompt_digests(own[turn * 7919 % len(own)]),
        )
        times.append(crowd.send(number, changes))
    return times


def run(keys: int = 1_000_000, rounds: int = 400) -> dict[str, Any]:
    """At ``keys`` keys of which each is held by three of eight instances: key changes per second, in
    batches of 1,024; a lookup of 512 keys with two runners-up (ms); both from frame to frame, without a
    socket. How fast everything is told at the beginning, with the longest message (ms). How long the end
    of an instance takes (ms). Bytes of memory per key, and per key and holder."""
    prompts = keys // PROMPT_CHUNKS
    gc.collect()
    tracemalloc.start()
    try:
        crowd = _Crowd()
        crowd.fill(prompts)
        gc.collect()
        memory = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    status = crowd.desk.directory.status(0.0)
    if status.keys != prompts * PROMPT_CHUNKS or any(
        each.sync is not SyncState.CURRENT for each in status.instances
    ):
        raise RuntimeError(f"there are {status.keys} keys")
    del crowd
    crowd = _Crowd()
    filling = crowd.fill(prompts)
    lookups = _lookups(crowd, prompts, rounds)
    misses = [crowd.find(prompt_digests(10 * prompts + turn), "i0")[0] for turn in range(rounds)]
    changes = _changes(crowd, prompts, rounds)
    began = time.perf_counter()
    crowd.desk.directory.leave(crowd.sessions[0], 0.0)
    leaving = time.perf_counter() - began
    return {
        "keys": status.keys,
        "holdings": sum(each.keys for each in status.instances),
        "changes_per_second": BATCH * rounds / sum(changes),
        "batch_1024_p99_ms": statistics.quantiles(changes, n=100)[98] * 1e3,
        "find_512_ms": statistics.median(lookups) * 1e3,
        "find_512_p99_ms": statistics.quantiles(lookups, n=100)[98] * 1e3,
        "find_512_of_nobody_ms": statistics.median(misses) * 1e3,
        "snapshot_keys_per_second": sum(each.keys for each in status.instances) / sum(filling),
        "longest_message_ms": max(filling) * 1e3,
        "leave_ms": leaving * 1e3,
        "bytes_per_key": memory / status.keys,
    }


def main() -> None:
    for name, value in run().items():
        print(f"{name:28s}{value:14,.3f}")


if __name__ == "__main__":
    main()
