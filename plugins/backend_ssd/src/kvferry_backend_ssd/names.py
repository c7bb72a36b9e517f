"""Names of folders and files: readable, always short, and always inside."""

from __future__ import annotations

import hashlib
import re

from kvferry_backend_ssd.entry import TAG_BYTES

OWNER_FILE = "owner"
_STORE = re.compile(r"store-[0-9a-f]{32}-[0-9]{1,15}\.kvf")
_READABLE = 40
_OTHERS = re.compile(r"[^A-Za-z0-9_-]+")


def set_folder(instance: str, rank: int) -> str:
    """Name of the folder that holds the stores of one rank of one instance. Two ranks or instances
    never share one, on file systems that fold case either; it never has more than 120 bytes."""
    slug = _OTHERS.sub("-", instance).strip("-")[:_READABLE].strip("-") or "instance"
    return f"{slug.lower()}-rank{rank}-{_digest(instance, rank).hex()}"


def store_file(shard: bytes, slot_bytes: int) -> str:
    """Name of the file that holds the chunks of one shard in slots of one size."""
    return f"store-{hashlib.blake2b(shard, digest_size=16).hexdigest()}-{slot_bytes}.kvf"


def is_store_file(name: str) -> bool:
    """Whether a file was named by :func:`store_file`, of whichever shard."""
    return _STORE.fullmatch(name) is not None


def store_tag(instance: str, rank: int, shard: bytes, slot_bytes: int) -> bytes:
    """What every entry of a store bears, so that none is ever read in another store."""
    return _digest(instance, rank, shard, slot_bytes)


def _digest(*parts: object) -> bytes:
    state = hashlib.blake2b(digest_size=TAG_BYTES)
    for part in parts:
        raw = part if isinstance(part, bytes) else str(part).encode("utf-8", "surrogatepass")
        state.update(len(raw).to_bytes(8, "little") + raw)
    return state.digest()
