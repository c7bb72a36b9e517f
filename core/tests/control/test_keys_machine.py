"""Chains of several requests that grow in turn and share one cache, against chains made in one go."""

from __future__ import annotations

from attrs import define, field
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvferry.api import GroupGeometry, KVGeometry
from kvferry.control.chain_cache import ChainCache
from kvferry.control.identity import LoRAIdentity, Namespace
from kvferry.control.keys import KeyChain, MediaItem

CHUNK, BLOCK = 4, 2
GROUP = GroupGeometry(kind="full", layers=1, kv_heads=1, head_size=8, dtype="bfloat16")
NAMESPACE = Namespace(model="m", revision="r", geometry=KVGeometry(groups=(GROUP,), chunk_tokens=CHUNK))

# So few of each that chains which are equal, or differ in one thing only, are common.
salts = st.sampled_from(["", "s"])
loras = st.sampled_from([None, LoRAIdentity(name="a", version="1"), LoRAIdentity(name="a", version="2")])
pieces = st.lists(st.integers(0, 1), max_size=6)
pictures = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 3), st.sampled_from("pq")), max_size=2)


@define(eq=False)
class Grown:
    """A chain and everything that went into it."""

    chain: KeyChain
    salt: str
    lora: LoRAIdentity | None
    tokens: list[int] = field(factory=list)
    media: list[MediaItem] = field(factory=list)

    def seen(self, end: int) -> object:
        """What the first ``end`` tokens hold, by which alone a digest may be told from another."""
        media = sorted((i.start, i.length, i.identifier) for i in self.media if i.start < end)
        return self.salt, self.lora, tuple(self.tokens[:end]), tuple(media)


class KeyMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.cache = ChainCache(1500)  # three or four chunks, so that it forgets all the time
        self.grown: list[Grown] = []
        self.contents: dict[bytes, object] = {}

    @precondition(lambda self: len(self.grown) < 6)
    @rule(salt=salts, lora=loras, cached=st.booleans())
    def begin(self, salt: str, lora: LoRAIdentity | None, cached: bool) -> None:
        cache = self.cache if cached else None
        self.grown.append(Grown(KeyChain(NAMESPACE, salt=salt, lora=lora, cache=cache), salt, lora))

    @precondition(lambda self: self.grown)
    @rule(data=st.data(), tokens=pieces, items=pictures)
    def extend(self, data: st.DataObject, tokens: list[int], items: list[tuple[int, int, str]]) -> None:
        grown = data.draw(st.sampled_from(self.grown))
        before = len(grown.tokens)
        media = [
            MediaItem(identifier=name, start=before + start, length=length)
            for start, length, name in items
            if start + length <= len(tokens)
        ]
        grown.chain.extend(tokens, media=media)
        grown.tokens += tokens
        grown.media += media

    @rule()
    def forget(self) -> None:
        self.cache.clear()

    @invariant()
    def growing_is_the_same_as_one_go(self) -> None:
        for grown in self.grown:
            whole = KeyChain(NAMESPACE, salt=grown.salt, lora=grown.lora)
            whole.extend(grown.tokens, media=grown.media)
            assert grown.chain.tokens == len(grown.tokens)
            assert grown.chain.keys == whole.keys
            for chunk in range(len(whole.keys) + 1):
                assert grown.chain.parent(chunk) == whole.parent(chunk)
                assert grown.chain.tail_keys(chunk, BLOCK) == whole.tail_keys(chunk, BLOCK)

    @invariant()
    def one_digest_is_one_content(self) -> None:
        """Equal beginnings have equal digests, and nothing else has them."""
        now: dict[object, bytes] = {}
        for grown in self.grown:
            ends = [((chunk + 1) * CHUNK, key) for chunk, key in enumerate(grown.chain.keys)]
            for chunk in range(len(grown.chain.keys) + 1):
                tails = grown.chain.tail_keys(chunk, BLOCK)
                ends += [(chunk * CHUNK + held, digest) for digest, held in tails]
            for end, digest in ends:
                seen = grown.seen(end)
                assert self.contents.setdefault(digest, seen) == seen
                assert now.setdefault(seen, digest) == digest


TestKeyMachine = KeyMachine.TestCase
TestKeyMachine.settings = settings(max_examples=80, stateful_step_count=25, deadline=None)
