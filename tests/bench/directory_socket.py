"""Lookups in a running controller that knows a million keys, from an instance's connection and back.

Run ``python -m tests.bench.directory_socket``.
"""

from __future__ import annotations

import contextlib
import os
import queue
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

from kvferry_sharing_p2p.directory.answers import Found
from kvferry_sharing_p2p.directory.publisher import Identity, PublisherOptions, PublisherState
from kvferry_sharing_p2p.network.client import DirectoryClient
from kvferry_sharing_p2p.network.endpoint import Endpoint, parse_url
from kvferry_sharing_p2p.network.finds import Unanswered
from kvferry_sharing_p2p.network.secret import SharedSecret
from tests.bench.directory import PROMPT_CHUNKS, SPACE, prompt_digests

HOLDERS = 2
PATIENCE = 300.0
SECRET = "a secret for figures, known to all"
_VARIABLE = "KVFERRY_BENCH_SECRET"


class _Prompts:
    """So many prompts, a whole one at a time."""

    def __init__(self, count: int) -> None:
        self._count = count

    def walk(self, cursor: int, limit: int) -> tuple[bytes, int | None]:
        end = min(self._count, cursor + max(1, limit // PROMPT_CHUNKS))
        digests = b"".join(prompt_digests(number) for number in range(cursor, end))
        return digests, end if end < self._count else None


@contextlib.contextmanager
def _controller(secret: bool) -> Iterator[Endpoint]:
    words = [sys.executable, "-m", "kvferry.cli.main", "controller", "--listen", "tcp://127.0.0.1:0"]
    words += ["--http", "off", *(["--secret-variable", _VARIABLE] if secret else [])]
    environment = {**os.environ, _VARIABLE: SECRET}
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        if process.stdout is None:
            raise RuntimeError("the controller has no output")
        yield parse_url(process.stdout.readline().split()[3].rstrip(","))
    finally:
        process.terminate()
        process.communicate()


@contextlib.contextmanager
def _instance(name: str, endpoint: Endpoint, secret: bool, prompts: int) -> Iterator[DirectoryClient]:
    client = DirectoryClient(
        endpoint,
        SharedSecret(SECRET.encode()) if secret else None,
        Identity(instance=name, epoch=os.urandom(16), namespace=SPACE, ranks=1, address=name.encode()),
        _Prompts(prompts),
        PublisherOptions(),
        clock=time.monotonic,
        random=os.urandom,
    )
    client.open()
    try:
        deadline = time.monotonic() + PATIENCE
        while client.status().publisher.state is not PublisherState.CURRENT:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{name} was not taken in: {client.status()}")
            time.sleep(0.01)
        yield client
    finally:
        client.close(time.monotonic() + PATIENCE)


def _find(client: DirectoryClient, digests: bytes) -> float:
    """Seconds from the question to its answer, two changes of threads and of processes included."""
    answers: queue.SimpleQueue[Found | Unanswered] = queue.SimpleQueue()
    began = time.perf_counter()
    client.find(SPACE, digests, 3, time.monotonic() + PATIENCE, answers.put)
    found = answers.get(timeout=PATIENCE)
    seconds = time.perf_counter() - began
    if not isinstance(found, Found) or [each.chunks for each in found.holders] != [PROMPT_CHUNKS] * HOLDERS:
        raise RuntimeError(f"a prompt was not found: {found}")
    return seconds


def run(keys: int = 1_000_000, rounds: int = 2000) -> dict[str, float]:
    """Lookups of 512 keys, one after the other, at ``keys`` keys that two instances have: milliseconds at the
    median and at the 99th percentile, in the clear and with a shared secret; and how many keys a second
    are told at the beginning."""
    prompts = keys // PROMPT_CHUNKS
    figures: dict[str, float] = {"keys": prompts * PROMPT_CHUNKS}
    for secret in (False, True):
        with contextlib.ExitStack() as stack:
            endpoint = stack.enter_context(_controller(secret))
            began = time.perf_counter()
            for number in range(HOLDERS):
                stack.enter_context(_instance(f"i{number}", endpoint, secret, prompts))
            told = HOLDERS * prompts * PROMPT_CHUNKS / (time.perf_counter() - began)
            client = stack.enter_context(_instance("asker", endpoint, secret, 0))
            # A stride that visits all parts of the table, so that no cache is warm by accident.
            asked = [prompt_digests(turn * 7919 % prompts) for turn in range(rounds)]
            times = sorted(_find(client, digests) for digests in asked)
        way = "with_secret" if secret else "in_the_clear"
        figures[f"find_512_{way}_ms"] = 1000 * statistics.median(times)
        figures[f"find_512_{way}_p99_ms"] = 1000 * times[len(times) * 99 // 100]
        figures[f"told_keys_per_second_{way}"] = told
    return figures


def main() -> None:
    for name, value in run().items():
        print(f"{name:36s}{value:14,.3f}")


if __name__ == "__main__":
    main()
