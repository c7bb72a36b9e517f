"""Chunk keys of one request: chaining, isolation, tails and media."""

from __future__ import annotations

from collections import UserList
from collections.abc import Sequence
from typing import Any

import attrs
import numpy
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvferry.api import ErrorKind, GroupGeometry, KVFerryError, KVGeometry
from kvferry.control.identity import SHA256, ChunkHash, LoRAIdentity, Namespace
from kvferry.control.keys import KeyChain, MediaItem
from kvferry.control.tokens import TokenPacker, pack_tokens

GROUP = GroupGeometry(kind="full", layers=2, kv_heads=2, head_size=8, dtype="bfloat16")


def make_namespace(chunk_tokens: int = 4, **changes: Any) -> Namespace:
    geometry = KVGeometry(groups=(GROUP,), chunk_tokens=chunk_tokens)
    return Namespace(**{"model": "m", "revision": "r", "geometry": geometry, **changes})


def make_chain(
    tokens: Sequence[int] = (),
    media: Sequence[MediaItem] = (),
    *,
    namespace: Namespace | None = None,
    salt: str = "",
    lora: LoRAIdentity | None = None,
) -> KeyChain:
    chain = KeyChain(namespace or make_namespace(), salt=salt, lora=lora)
    chain.extend(tokens, media=media)
    return chain


def all_digests(chain: KeyChain) -> list[bytes]:
    """Keys of the full chunks and of every shorter beginning of every chunk."""
    digests = list(chain.keys)
    for chunk in range(len(chain.keys) + 1):
        digests += [digest for digest, _ in chain.tail_keys(chunk, 1)]
    return digests


small_tokens = st.lists(st.integers(0, 2), max_size=11)
small_names = st.text("as", max_size=2)
small_loras = st.none() | st.builds(LoRAIdentity, name=small_names, version=small_names)


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, LoRAIdentity | None, list[int], list[MediaItem]]:
    """Requests over so few letters that near misses and true equals are common."""
    tokens = draw(small_tokens)
    media = []
    for _ in range(draw(st.integers(0, 2)) if tokens else 0):
        start = draw(st.integers(0, len(tokens) - 1))
        length = draw(st.integers(1, len(tokens) - start))
        media.append(MediaItem(identifier=draw(small_names), start=start, length=length))
    return draw(small_names), draw(small_loras), tokens, media


# -- chaining ------------------------------------------------------------------------------------


@given(st.lists(requests(), max_size=12))
def test_requests_share_their_last_digest_only_when_they_are_equal(many: list[Any]) -> None:
    last: dict[bytes, Any] = {}
    for salt, lora, tokens, media in many:
        chain = make_chain(tokens, media, salt=salt, lora=lora)
        tail = chain.tail_keys(len(chain.keys), 1)
        digest = tail[0][0] if tail else chain.parent(len(chain.keys))
        content = (salt, lora, tokens, sorted((i.start, i.length, i.identifier) for i in media))
        assert last.setdefault(digest, content) == content
    contents = {repr(content) for content in last.values()}
    assert len(contents) == len(last)


@given(requests())
def test_all_digests_of_a_request_differ(request: Any) -> None:
    salt, lora, tokens, media = request
    chain = make_chain(tokens, media, salt=salt, lora=lora)
    digests = [chain.root, *all_digests(chain)]
    assert len(set(digests)) == len(digests)
    assert len(digests) == 1 + len(tokens)
    assert all(len(digest) == 32 for digest in digests)


@given(st.lists(st.lists(st.integers(0, 2**32 - 1), max_size=9), max_size=6))
def test_how_tokens_are_cut_into_calls_does_not_matter(pieces: list[list[int]]) -> None:
    chain = make_chain()
    for piece in pieces:
        chain.extend(piece)
    whole = make_chain([token for piece in pieces for token in piece])
    assert chain.tokens == whole.tokens == sum(map(len, pieces))
    assert chain.keys == whole.keys
    assert len(chain.keys) == chain.tokens // 4
    assert all_digests(chain) == all_digests(whole)


@given(small_tokens, small_tokens)
def test_keys_agree_exactly_as_far_as_whole_chunks_do(one: list[int], other: list[int]) -> None:
    a, b = make_chain(one).keys, make_chain(other).keys
    for chunk in range(min(len(a), len(b))):
        end = 4 * (chunk + 1)
        assert (a[chunk] == b[chunk]) == (one[:end] == other[:end])


def test_no_tokens_give_no_keys() -> None:
    chain = make_chain([])
    assert (chain.tokens, chain.keys, chain.tail_keys(0, 2)) == (0, [], [])
    assert make_chain([1, 2, 3]).keys == []


def test_a_parent_is_the_true_predecessor() -> None:
    chain = make_chain(range(9))
    assert [chain.parent(chunk) for chunk in range(3)] == [chain.root, *chain.keys]
    for outside in (-1, 3):
        with pytest.raises(IndexError, match="2 full chunks"):
            chain.parent(outside)


# -- isolation -----------------------------------------------------------------------------------


def test_nothing_is_found_across_declared_identities() -> None:
    group = GROUP
    geometry = KVGeometry(groups=(group,), chunk_tokens=4)

    def geometry_with(**changes: Any) -> KVGeometry:
        return attrs.evolve(geometry, groups=(attrs.evolve(group, **changes),))

    namespaces = [
        make_namespace(),
        make_namespace(model="m2"),
        make_namespace(revision="r2"),
        make_namespace(model="mr", revision=""),
        make_namespace(model="m", revision="rr"),
        make_namespace(geometry=geometry_with(dtype="float8_e4m3fn")),
        make_namespace(geometry=geometry_with(kind="mla")),
        make_namespace(geometry=geometry_with(kind="sliding", window=64)),
        make_namespace(geometry=geometry_with(kv_heads=4)),
        make_namespace(geometry=geometry_with(head_size=16)),
        make_namespace(geometry=geometry_with(layers=3)),
        make_namespace(geometry=attrs.evolve(geometry, groups=(group, group))),
        make_namespace(chunk_tokens=2),
        # The same function under another name: the name alone must keep them apart.
        make_namespace(hash=ChunkHash(name="other", digest=SHA256.digest)),
    ]
    loras = [
        None,
        LoRAIdentity(name="", version=""),
        LoRAIdentity(name="a", version="1"),
        LoRAIdentity(name="a", version="2"),
        LoRAIdentity(name="a1", version=""),
        LoRAIdentity(name="b", version="1"),
    ]
    salts = ["", "x", "y", "a1"]
    assert len({namespace.digest for namespace in namespaces}) == len(namespaces)
    seen: set[bytes] = set()
    total = 0
    for namespace in namespaces:
        for lora in loras:
            for salt in salts:
                chain = make_chain(range(8), namespace=namespace, salt=salt, lora=lora)
                digests = [chain.root, *all_digests(chain)]
                seen.update(digests)
                total += len(digests)
    assert len(seen) == total


@given(small_names, small_loras, small_names, small_loras)
def test_salt_and_adapter_cannot_borrow_letters_from_each_other(
    salt: str, lora: LoRAIdentity | None, salt2: str, lora2: LoRAIdentity | None
) -> None:
    one = make_chain(salt=salt, lora=lora).root
    other = make_chain(salt=salt2, lora=lora2).root
    assert (one == other) == ((salt, lora) == (salt2, lora2))


def test_salt_and_adapter_have_no_silent_default() -> None:
    unchecked: Any = KeyChain
    with pytest.raises(TypeError, match="salt"):
        unchecked(make_namespace(), lora=None)
    with pytest.raises(TypeError, match="lora"):
        unchecked(make_namespace(), salt="")
    with pytest.raises(TypeError, match="salt must be a string"):
        unchecked(make_namespace(), salt=None, lora=None)
    with pytest.raises(TypeError, match="lora must be"):
        unchecked(make_namespace(), salt="", lora="adapter")


def test_any_text_a_user_sends_is_a_salt() -> None:
    salts = ["\ud800", "\ufffd", "?", "\0", "é", "e\u0301", "x" * 10_000]
    assert len({make_chain(salt=salt).root for salt in salts}) == len(salts)


def test_a_namespace_that_means_nothing_is_refused() -> None:
    with pytest.raises(KVFerryError, match="no name") as caught:
        make_namespace(model="")
    assert caught.value.kind is ErrorKind.CONFIG
    with pytest.raises(KVFerryError, match="cannot hold 0 tokens"):
        make_namespace(chunk_tokens=0)
    with pytest.raises(KVFerryError, match="gives 16 bytes, not 32"):
        make_namespace(hash=ChunkHash(name="short", digest=lambda m: SHA256.digest(m)[:16]))


# -- tails ---------------------------------------------------------------------------------------


@given(requests(), st.sampled_from([1, 2, 4]))
def test_a_tail_has_the_digest_of_the_same_beginning_of_a_longer_request(
    request: Any, block_tokens: int
) -> None:
    salt, lora, tokens, media = request
    chain = make_chain(tokens, media, salt=salt, lora=lora)
    for chunk in range(len(chain.keys) + 1):
        held = min(4, len(tokens) - 4 * chunk)
        tails = chain.tail_keys(chunk, block_tokens)
        counts = [count for count in (3, 2, 1) if count <= held and count % block_tokens == 0]
        assert [count for _, count in tails] == counts
        for digest, count in tails:
            # An item that is cut off cannot be handed in; one that ends here can.
            end = 4 * chunk + count
            if all(item.end <= end or item.start >= end for item in media):
                inside = [item for item in media if item.end <= end]
                cut = make_chain(tokens[:end], inside, salt=salt, lora=lora)
                assert cut.tail_keys(chunk, 1)[0] == (digest, count)


def test_tails_of_blocks_that_do_not_fit_or_chunks_that_are_not_there() -> None:
    chain = make_chain(range(6))
    for block_tokens in (0, -1, 3, 8):
        with pytest.raises(ValueError, match="whole number of blocks"):
            chain.tail_keys(0, block_tokens)
    assert chain.tail_keys(0, 4) == []
    for outside in (-1, 2):
        with pytest.raises(IndexError):
            chain.tail_keys(outside, 2)


# -- media ---------------------------------------------------------------------------------------


def picture(start: int, length: int, identifier: str = "picture") -> MediaItem:
    return MediaItem(identifier=identifier, start=start, length=length)


def test_media_enters_at_the_chunk_where_it_lies() -> None:
    tokens = [7] * 20  # five chunks; nothing but the media tells these requests apart
    plain = make_chain(tokens).keys
    keys = make_chain(tokens, [picture(9, 2)]).keys
    assert keys[:2] == plain[:2]
    assert not set(keys[2:]) & set(plain)
    for other in (
        picture(9, 2, "other"),
        picture(9, 2, "Picture"),
        picture(10, 2),
        picture(9, 1),
        picture(9, 3),
    ):
        changed = make_chain(tokens, [other]).keys
        assert changed[:2] == keys[:2]
        assert not set(changed[2:]) & set(keys)


def test_media_over_several_chunks_enters_each_with_its_part() -> None:
    # The same picture, moved by whole chunks: each middle chunk holds other parts of it.
    tokens = [7] * 24
    early, late = make_chain(tokens, [picture(2, 14)]), make_chain(tokens, [picture(6, 14)])
    assert early.keys[0] != late.keys[0]
    assert not set(early.keys[1:]) & set(late.keys[1:])
    # Only a length tells these two apart, and already in the first chunk that both fill.
    longer = make_chain(tokens, [picture(2, 15)])
    assert early.keys[0] != longer.keys[0]


def test_equal_media_after_different_text_does_not_match_but_before_it_does() -> None:
    tokens = [7] * 16
    a = make_chain([*tokens, 1, 1, 1, 1], [picture(4, 4)])
    b = make_chain([*tokens, 2, 2, 2, 2], [picture(4, 4)])
    assert a.keys[:4] == b.keys[:4]
    assert a.keys[4] != b.keys[4]
    c = make_chain([8, *tokens[1:]], [picture(4, 4)])
    assert not set(a.keys) & set(c.keys)


def test_tails_before_the_media_match_plain_text() -> None:
    tokens = [7] * 8
    plain = {count: digest for digest, count in make_chain(tokens).tail_keys(1, 1)}
    illustrated = make_chain(tokens, [picture(6, 2)])
    mixed = {count: digest for digest, count in illustrated.tail_keys(1, 1)}
    assert mixed[1] == plain[1]
    assert mixed[2] == plain[2]
    assert mixed[3] != plain[3]


@given(requests(), st.randoms(use_true_random=False))
def test_the_order_in_which_media_is_handed_in_does_not_matter(request: Any, random: Any) -> None:
    salt, lora, tokens, media = request
    shuffled = random.sample(media, len(media))
    one = make_chain(tokens, media, salt=salt, lora=lora)
    assert all_digests(make_chain(tokens, shuffled, salt=salt, lora=lora)) == all_digests(one)


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6), small_names), max_size=4))
@settings(max_examples=50)
def test_media_in_later_calls_counts_from_the_start_of_the_request(
    turns: list[tuple[int, int, str]],
) -> None:
    chain = make_chain()
    media: list[MediaItem] = []
    for text, length, identifier in turns:
        item = picture(chain.tokens + text, length, identifier)
        chain.extend([7] * (text + length), media=[item])
        media.append(item)
    assert all_digests(chain) == all_digests(make_chain([7] * chain.tokens, media))


@pytest.mark.parametrize("item", [picture(3, 2), picture(7, 2), picture(5, 0), picture(-1, 9)])
def test_media_outside_its_tokens_is_refused_and_changes_nothing(item: MediaItem) -> None:
    chain = make_chain([7] * 4)
    before = list(chain.keys)
    with pytest.raises(KVFerryError, match="covers tokens") as caught:
        chain.extend([7] * 4, media=[picture(4, 2), item])
    assert caught.value.kind is ErrorKind.UNSUPPORTED
    assert (chain.tokens, chain.keys) == (4, before)
    chain.extend([7] * 4)
    assert chain.keys == make_chain([7] * 8).keys


# -- token ids -----------------------------------------------------------------------------------


def native_packer() -> TokenPacker:
    packer: TokenPacker = pytest.importorskip(
        "kvferry_native", reason="kvferry-native is not installed"
    ).pack_tokens
    return packer


@pytest.fixture(params=["python", "native"])
def pack(request: pytest.FixtureRequest) -> TokenPacker:
    return native_packer() if request.param == "native" else pack_tokens


@given(tokens=st.lists(st.integers(0, 2**32 - 1), max_size=20))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])  # it has no state
def test_tokens_are_four_bytes_each_little_endian(pack: TokenPacker, tokens: list[int]) -> None:
    expected = b"".join(token.to_bytes(4, "little") for token in tokens)
    assert pack(tokens) == pack(tuple(tokens)) == expected
    array: Any = numpy.array(tokens, dtype=numpy.int64)
    assert pack(array) == expected
    assert pack(UserList(tokens)) == expected


@pytest.mark.parametrize("bad", [-1, 2**32, -(2**70), 2**70, None, "7", 1.0])
@pytest.mark.parametrize("before", [0, 1, 5])
def test_what_is_not_a_token_id_is_refused_by_position(pack: TokenPacker, bad: Any, before: int) -> None:
    chain = KeyChain(make_namespace(), salt="", lora=None, pack=pack)
    chain.extend([7] * 5)
    keys = list(chain.keys)
    with pytest.raises(KVFerryError) as caught:
        chain.extend([7] * before + [bad] + [7] * 2)
    assert caught.value.kind is ErrorKind.UNSUPPORTED
    assert f"token {bad!r} at position {5 + before} " in caught.value.what
    assert caught.value.remedy
    assert (chain.tokens, chain.keys) == (5, keys)


def test_raw_bytes_are_not_taken_for_token_ids() -> None:
    for raw in (b"\1\0\0\0", bytearray(4), "text"):
        with pytest.raises(TypeError, match="sequence of ids"):
            make_chain().extend(raw)  # type: ignore[arg-type]


def test_a_packer_that_loses_tokens_is_found_out() -> None:
    chain = KeyChain(make_namespace(), salt="", lora=None, pack=lambda tokens: b"\0" * 4)
    with pytest.raises(KVFerryError, match="2 tokens were packed into 4 bytes"):
        chain.extend([1, 2])
    assert chain.tokens == 0
