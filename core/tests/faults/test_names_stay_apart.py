"""Names that differ lead to places that differ, whatever letters they are made of."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from attrs import evolve

from kvferry.api import ChunkKey, GroupGeometry, KVGeometry
from kvferry.control.identity import LoRAIdentity, Namespace
from kvferry.control.keys import KeyChain
from kvferry.runtime.address import MeetingPlace

GEOMETRY = KVGeometry(
    groups=(GroupGeometry(kind="full", layers=1, kv_heads=1, head_size=1, dtype="uint8"),), chunk_tokens=16
)
NAMESPACE = Namespace(model="m", revision="1", geometry=GEOMETRY)
# Separators of paths, of other systems' keys, and of our own encodings; text that folds or joins.
PIECES = ("", "a", "A", "b", "/", "-SEP-", "--", "@", "%2f", "%", ":", "..", ".", "\\", " ", "\n", "\0", "#")
MORE = ("é", "e\u0301", "ß", "ss", "ﬁ", "模型", "🙂", "s\x04\x00\x00\x00", "n", "0", "1", "_dp0", "_dp1")
PAIRS = 10_000


def names(seed: int) -> Iterator[tuple[str, str]]:
    """Pairs of names that are hard to tell apart, all different."""
    chance = random.Random(seed)
    seen = set()
    while len(seen) < PAIRS:
        pair = tuple("".join(chance.choices(PIECES + MORE, k=chance.randrange(4))) for _ in range(2))
        if pair not in seen:
            seen.add(pair)
            yield pair


def folder_of(name: str) -> str:
    return str(MeetingPlace(name, "/run", {}).folder)


def namespace_of(model: str, revision: str) -> bytes:
    # Without a name there is no model; one letter in front keeps the names as different as they were.
    return Namespace(model=f"m{model}", revision=revision, geometry=GEOMETRY).digest


def root_of(salt: str, lora: LoRAIdentity | None) -> bytes:
    return KeyChain(NAMESPACE, salt=salt, lora=lora).root


def tier_file(model: str, revision: str) -> str:
    return ChunkKey(namespace_of(model, revision), root_of(revision, None)).to_text()


@pytest.mark.parametrize(
    "place",
    [
        namespace_of,
        tier_file,
        lambda one, other: root_of(one, LoRAIdentity(name=other, version="")),
        lambda one, other: root_of("", LoRAIdentity(name=one, version=other)),
        lambda one, other: folder_of(f"{len(one)} {one}{other}"),
    ],
    ids=["model and revision", "file name", "salt and adapter", "adapter and version", "engine id"],
)
def test_ten_thousand_pairs_of_names_have_ten_thousand_places(place: Callable[[str, str], object]) -> None:
    """A separator that may itself occur in a name joins two models into one (LMCache#5069)."""
    assert len({place(*pair) for pair in names(1)}) == PAIRS


def test_an_engine_id_never_leads_out_of_the_runtime_folder() -> None:
    for one, other in names(2):
        folder = Path(folder_of(one + other))
        assert folder.parent == Path("/run/kvferry")
        assert folder.name.isalnum()
        assert folder.name.isascii()


def test_chunks_of_another_geometry_share_no_namespace_even_where_their_bytes_are_as_many() -> None:
    """Twice the tokens at half the width fill a slot as well (LMCache#1856)."""
    (group,) = GEOMETRY.groups
    wide = evolve(group, dtype="bfloat16")
    narrow = evolve(group, dtype="float8_e4m3fn")
    digests = {
        Namespace(
            model="m", revision="1", geometry=evolve(GEOMETRY, groups=(each,), chunk_tokens=tokens)
        ).digest
        for each, tokens in ((wide, 256), (narrow, 512), (narrow, 256), (wide, 512))
    }
    assert len(digests) == 4
