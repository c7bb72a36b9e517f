"""How fast chunk keys are computed. Run: ``python tests/bench/keys.py``.

All variants are measured in turn within one loop, so that a busy machine slows all of them alike.
"""

from __future__ import annotations

import array
import hashlib
import importlib
import os
import random
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

from kvferry.api import GroupGeometry, KVGeometry
from kvferry.control.chain_cache import ChainCache
from kvferry.control.identity import SHA256, ChunkHash, Namespace
from kvferry.control.keys import KeyChain
from kvferry.control.tokens import TokenPacker, pack_tokens

CHUNK_TOKENS = 256
TOKENS = 131_072
NEW_TOKENS = 1_024


def measure(variants: Mapping[str, Callable[[], object]], repetitions: int) -> dict[str, dict[str, float]]:
    """Seconds per call of each variant: ``min`` and ``median`` over interleaved repetitions."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(repetitions):
        for name, call in variants.items():
            began = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - began)
    return {name: {"min": min(s), "median": statistics.median(s)} for name, s in seconds.items()}


def optional(module: str) -> Any:
    """The module, or ``None`` where it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError:
        return None


def hash_variants(chunks: int = 512) -> dict[str, Callable[[], object]]:
    """A chain over ``chunks`` chunks of 1 KiB for every hash, call overhead included."""
    contents = [os.urandom(4 * CHUNK_TOKENS) for _ in range(chunks)]
    blake3 = optional("blake3")
    digests: dict[str, Callable[[bytes], bytes]] = {
        "sha256": lambda message: hashlib.sha256(message).digest(),
        "blake2b": lambda message: hashlib.blake2b(message, digest_size=32).digest(),
        "blake2s": lambda message: hashlib.blake2s(message).digest(),
    }
    if blake3 is not None:
        digests["blake3"] = lambda message: blake3.blake3(message).digest()

    def chain(digest: Callable[[bytes], bytes]) -> Callable[[], object]:
        def run_chain() -> None:
            parent = bytes(32)
            for content in contents:
                parent = digest(parent + content)

        return run_chain

    return {name: chain(digest) for name, digest in digests.items()}


def key_variants(packers: Mapping[str, TokenPacker]) -> dict[str, Callable[[], object]]:
    """Keys of a long prompt from scratch and in a later turn, and the baseline."""
    source = random.Random(0)
    tokens = [source.randrange(150_000) for _ in range(TOKENS)]
    later = tokens + [source.randrange(150_000) for _ in range(NEW_TOKENS)]
    space = namespace(SHA256)

    def scratch(pack: TokenPacker) -> Callable[[], object]:
        def call() -> None:
            KeyChain(space, salt="", lora=None, pack=pack).extend(tokens)

        return call

    def later_turn(pack: TokenPacker) -> Callable[[], object]:
        cache = ChainCache(1 << 30)
        KeyChain(space, salt="", lora=None, cache=cache).extend(tokens)

        def call() -> None:
            later[TOKENS] += 1  # otherwise the call before would have taught the cache this turn
            KeyChain(space, salt="", lora=None, pack=pack, cache=cache).extend(later)

        return call

    def append() -> None:
        growing.extend(fresh)

    growing = KeyChain(space, salt="", lora=None)
    growing.extend(tokens)
    fresh = later[TOKENS:]
    variants: dict[str, Callable[[], object]] = {
        "baseline: array of ids, one hash over all": lambda: hashlib.sha256(array.array("I", tokens)).digest()
    }
    for name, pack in packers.items():
        variants[f"keys from scratch, {name} packer"] = scratch(pack)
        variants[f"keys of a later turn, {name} packer"] = later_turn(pack)
    variants[f"{NEW_TOKENS} tokens more in one request"] = append
    return variants


def hashed_tokens_of_a_later_turn() -> int:
    """How many tokens were hashed for a prompt that repeats a known one and adds ``NEW_TOKENS``."""
    hashed: list[int] = []

    def counting(message: bytes) -> bytes:
        hashed.append(len(message))
        return SHA256.digest(message)

    space = namespace(ChunkHash(name=SHA256.name, digest=counting))
    cache = ChainCache(1 << 30)
    KeyChain(space, salt="", lora=None, cache=cache).extend(range(TOKENS))
    chain = KeyChain(space, salt="", lora=None, cache=cache)
    hashed.clear()
    chain.extend(range(TOKENS + NEW_TOKENS))
    return len(hashed) * CHUNK_TOKENS


def namespace(chunk_hash: ChunkHash) -> Namespace:
    group = GroupGeometry(kind="full", layers=28, kv_heads=4, head_size=128, dtype="bfloat16")
    geometry = KVGeometry(groups=(group,), chunk_tokens=CHUNK_TOKENS)
    return Namespace(model="bench", revision="0", geometry=geometry, hash=chunk_hash)


def run(repetitions: int = 31) -> dict[str, Any]:
    """All figures: seconds of each variant, tokens per second, and ratios to the baseline."""
    native = optional("kvferry_native")
    packers: dict[str, TokenPacker] = {"python": pack_tokens}
    if native is not None:
        packers["native"] = native.pack_tokens
    hashes = measure(hash_variants(), repetitions)
    keys = measure(key_variants(packers), repetitions)
    baseline = next(iter(keys.values()))["median"]
    return {
        "chunk_tokens": CHUNK_TOKENS,
        "tokens": TOKENS,
        "seconds_per_512_chunks": hashes,
        "seconds": keys,
        "times_baseline": {name: figures["median"] / baseline for name, figures in keys.items()},
        "million_tokens_per_second": {
            name: {"median": TOKENS / figures["median"] / 1e6, "best": TOKENS / figures["min"] / 1e6}
            for name, figures in keys.items()
            if name.startswith("keys from scratch")
        },
        "later_turn": {"new_tokens": NEW_TOKENS, "hashed_tokens": hashed_tokens_of_a_later_turn()},
    }


def main() -> None:
    figures = run()
    print(f"{'hash of a 1 KiB chunk, with its call':<48}{'median':>12}{'min':>12}")
    for name, seconds in figures["seconds_per_512_chunks"].items():
        print(f"{name:<48}{seconds['median'] / 512 * 1e9:>9.0f} ns{seconds['min'] / 512 * 1e9:>9.0f} ns")
    print(f"\n{figures['tokens']} tokens in chunks of {figures['chunk_tokens']}")
    for name, seconds in figures["seconds"].items():
        line = f"{name:<48}{seconds['median'] * 1e3:>9.3f} ms{seconds['min'] * 1e3:>9.3f} ms"
        rate = figures["million_tokens_per_second"].get(name)
        print(line + (f"{rate['median']:>7.0f} million tokens/s" if rate else ""))
    later = figures["later_turn"]
    print(f"\na later turn with {later['new_tokens']} new tokens hashes {later['hashed_tokens']} tokens")


if __name__ == "__main__":
    main()
