"""Every process derives the same keys, and no release changes them unnoticed."""

from __future__ import annotations

import hashlib
import os
import struct
import subprocess
import sys

from kvferry.api import ChunkKey, GroupGeometry, KVGeometry
from kvferry.control.identity import LoRAIdentity, Namespace
from kvferry.control.keys import KeyChain, MediaItem

GOLDEN_NAMESPACE = "924fb72a6aef3043c835355e1532c5b286268248f1f04a6bd93ae153ba24290a"
GOLDEN_ROOT = "2ff0ecbdc765366fdb44d3469887c58767ee6706902be52b3a27d5bb566e4a34"
GOLDEN_KEYS = [
    "b3927cf514324c6dfcdb8eee7033eb4b634839af99de0c41e62f9210d63e32b3",
    "d091529f7e3d200f4e51f1300499a71025b6cb31aa80941169d25e7f2eb393ac",
]
GOLDEN_TAILS = [
    ("941797a7a1c8b4bc3fbfb0b31bd38dd922e414e4ec8112f99c1f1321c2b3363d", 4),
    ("5105d7472ce6830f4df3c28905effa0976c1fb13d1d64b49d94d4c218bcc2ecc", 2),
]
GOLDEN_TEXT = (
    "sjh3oktk54yehsbvgvpbkmwfwkdcnasi6hyeu26zhlqvhorefefa."
    "wojhz5iugjgg37g3r3xham7ljnruqonpthpayqpgf6jbbvr6gkzq"
)

PROGRAM = """
from kvferry.api import GroupGeometry, KVGeometry
from kvferry.control.identity import LoRAIdentity, Namespace
from kvferry.control.keys import KeyChain, MediaItem
full = GroupGeometry(kind="full", layers=28, kv_heads=4, head_size=128, dtype="bfloat16")
namespace = Namespace(
    model="org/model", revision="1", geometry=KVGeometry(groups=(full,), chunk_tokens=256)
)
chain = KeyChain(namespace, salt="tenant", lora=LoRAIdentity(name="a", version="2"))
chain.extend(range(1000), media=[MediaItem(identifier="image", start=300, length=99)])
print(namespace.digest.hex())
for digest in [chain.root, *chain.keys]:
    print(digest.hex())
for digest, count in chain.tail_keys(3, 16):
    print(count, digest.hex())
print(hash("text"))
"""


def test_processes_with_any_hash_seed_derive_the_same_keys() -> None:
    outputs = []
    for seed in (None, "1", "2"):
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONHASHSEED"}
        if seed is not None:
            environment["PYTHONHASHSEED"] = seed
        run = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        outputs.append(run.stdout.splitlines())
    keys = [lines[:-1] for lines in outputs]
    assert keys[0] == keys[1] == keys[2]
    assert len(keys[0]) == 1 + 1 + 3 + 14
    # Otherwise the seeds did not take effect and the comparison above says nothing.
    assert outputs[1][-1] != outputs[2][-1]


def golden_chain() -> KeyChain:
    full = GroupGeometry(kind="full", layers=28, kv_heads=4, head_size=128, dtype="bfloat16")
    sliding = GroupGeometry(kind="sliding", layers=4, kv_heads=8, head_size=64, dtype="float16", window=512)
    namespace = Namespace(
        model="org/model",
        revision="0123abcd",
        geometry=KVGeometry(groups=(full, sliding), chunk_tokens=8),
    )
    chain = KeyChain(namespace, salt="tenant-é", lora=LoRAIdentity(name="adapter", version="/loras/2"))
    chain.extend(
        [0, 1, 2, 3, 151_643, 2**31, 2**32 - 1, 7, *range(12)],
        media=[
            MediaItem(identifier="sha:abc", start=6, length=5),
            MediaItem(identifier="clip", start=12, length=4),
        ],
    )
    return chain


def test_golden_keys() -> None:
    """When this fails, stored chunks can no longer be found. If that is meant, raise
    ``KEY_FORMAT_VERSION`` and put the new values here."""
    chain = golden_chain()
    assert chain.namespace.digest.hex() == GOLDEN_NAMESPACE
    assert chain.root.hex() == GOLDEN_ROOT
    assert [key.hex() for key in chain.keys] == GOLDEN_KEYS
    assert [(digest.hex(), count) for digest, count in chain.tail_keys(2, 2)] == GOLDEN_TAILS
    assert ChunkKey(chain.namespace.digest, chain.keys[0]).to_text() == GOLDEN_TEXT


def test_the_documented_messages_are_what_is_hashed() -> None:
    """An independent derivation of the golden keys from the description of the format."""

    def text(value: str) -> bytes:
        raw = value.encode()
        return b"s" + struct.pack("<I", len(raw)) + raw

    def number(value: int) -> bytes:
        raw = b"%d" % value
        return b"i" + struct.pack("<I", len(raw)) + raw

    def raw(value: bytes) -> bytes:
        return b"b" + struct.pack("<I", len(value)) + value

    def sequence(*items: bytes) -> bytes:
        return b"t" + struct.pack("<I", len(items)) + b"".join(items)

    def record(**fields: bytes) -> bytes:
        pairs = b"".join(text(name) + value for name, value in fields.items())
        return b"r" + struct.pack("<I", len(fields)) + pairs

    full = record(
        kind=text("full"),
        layers=number(28),
        kv_heads=number(4),
        head_size=number(128),
        dtype=text("bfloat16"),
        window=b"n",
    )
    sliding = record(
        kind=text("sliding"),
        layers=number(4),
        kv_heads=number(8),
        head_size=number(64),
        dtype=text("float16"),
        window=number(512),
    )
    geometry = record(groups=sequence(full, sliding), chunk_tokens=number(8))
    declared = sequence(number(1), text("org/model"), text("0123abcd"), geometry, text("sha256"))
    namespace = hashlib.sha256(b"kvferryN" + declared).digest()
    lora = record(name=text("adapter"), version=text("/loras/2"))
    root = hashlib.sha256(b"kvferryR" + sequence(raw(namespace), lora, text("tenant-é"))).digest()
    first = hashlib.sha256(
        b"kvferryC"
        + root
        + struct.pack("<II8I", 8, 1, 0, 1, 2, 3, 151_643, 2**31, 2**32 - 1, 7)
        + struct.pack("<qQI", 6, 5, 7)
        + b"sha:abc"
    ).digest()
    second = hashlib.sha256(
        b"kvferryC"
        + first
        + struct.pack("<II8I", 8, 2, *range(8))
        + struct.pack("<qQI", -2, 5, 7)
        + b"sha:abc"
        + struct.pack("<qQI", 4, 4, 4)
        + b"clip"
    ).digest()
    tail = hashlib.sha256(b"kvferryC" + second + struct.pack("<II2I", 2, 0, 8, 9)).digest()
    assert namespace.hex() == GOLDEN_NAMESPACE
    assert root.hex() == GOLDEN_ROOT
    assert [first.hex(), second.hex()] == GOLDEN_KEYS
    assert (tail.hex(), 2) == GOLDEN_TAILS[-1]
