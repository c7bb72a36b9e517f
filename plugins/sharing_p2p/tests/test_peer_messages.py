"""What schedulers say to each other arrives as it was meant, and nothing else is taken for a message."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.api import Answer, ErrorKind, Grant, KVFerryError, LentChunk, PeerAsk, Refusal, Refused
from kvferry_sharing_p2p.peers.messages import (
    MAXIMUM_FRAME_BYTES,
    MAXIMUM_KEYS,
    WIRE_VERSION,
    Ask,
    Card,
    Codec,
    Declined,
    Done,
    Granted,
    Hello,
    Rank,
    Renew,
    Renewed,
    Stranger,
    ToAsker,
    ToHolder,
    Unwelcome,
    Welcome,
)
from kvferry_sharing_p2p.peers.translation import answer_message, answer_of, ask_message, ask_of

digests = st.binary(min_size=32, max_size=32)
numbers = st.integers(0, (1 << 62) - 1)
aliases = st.lists(st.tuples(digests, st.integers(1, 4096)), max_size=4).map(tuple)
times = st.floats(0, 1e9)
asks = st.builds(
    PeerAsk,
    number=numbers,
    keys=st.lists(digests, max_size=20).map(tuple),
    tails=aliases,
    skip=st.integers(0, MAXIMUM_KEYS),
    limit_tokens=numbers,
)
lent = st.builds(
    LentChunk,
    digest=digests,
    parent=st.none() | digests,
    depth=st.integers(0, MAXIMUM_KEYS),
    tokens=st.integers(1, 4096),
    aliases=aliases,
    model=st.text(max_size=20),
    seconds=times | st.just(math.inf),
)
grants = st.lists(st.tuples(lent, numbers), min_size=1, max_size=10).flatmap(
    lambda pairs: st.builds(
        Grant,
        number=numbers,
        chunks=st.just(tuple(chunk for chunk, _ in pairs)),
        slots=st.just(tuple(slot for _, slot in pairs)),
        tokens=numbers,
        seconds=times,
    )
)
answers = grants | st.builds(Refused, numbers, st.sampled_from(Refusal))
CARD = Card("a", bytes(16), bytes(32), 256, 128, "tcp", (Rank(b"shard", 4096, b"export"),))
TO_HOLDER: list[ToHolder] = [
    Hello(WIRE_VERSION, bytes(16), CARD),
    Ask(1, bytes(64), ((bytes(32), 128),), 1, 500),
    Renew(1, 2),
    Done(1),
]
TO_ASKER: list[ToAsker] = [
    Welcome(CARD),
    Unwelcome("P2P001", "another model"),
    Declined(1, Refusal.BUSY),
    Renewed(1, 2, 3.0),
    Stranger(),
]


@settings(deadline=None)
@given(asks)
def test_an_ask_arrives_as_it_was_asked(ask: PeerAsk) -> None:
    codec = Codec()
    message = codec.read_to_holder(codec.encode(ask_message(ask)), "a peer")
    assert isinstance(message, Ask)
    assert ask_of(message) == ask


@settings(deadline=None)
@given(answers)
def test_an_answer_arrives_as_it_was_given(answer: Answer) -> None:
    codec = Codec()
    message = codec.read_to_asker(codec.encode(answer_message(answer)), "a peer")
    assert isinstance(message, Granted | Declined)
    assert answer_of(message) == answer


@pytest.mark.parametrize("message", TO_HOLDER, ids=lambda each: type(each).__name__)
def test_what_is_for_the_holder_is_read_by_the_holder_alone(message: ToHolder) -> None:
    codec = Codec()
    frame = codec.encode(message)
    assert codec.read_to_holder(frame, "a peer") == message
    with pytest.raises(KVFerryError) as caught:
        codec.read_to_asker(frame, "tcp://10.0.0.1:1")
    assert (caught.value.kind, caught.value.where) == (ErrorKind.PROTOCOL, "tcp://10.0.0.1:1")


@pytest.mark.parametrize("message", TO_ASKER, ids=lambda each: type(each).__name__)
def test_what_is_for_the_asker_is_read_by_the_asker_alone(message: ToAsker) -> None:
    codec = Codec()
    frame = codec.encode(message)
    assert codec.read_to_asker(frame, "a peer") == message
    with pytest.raises(KVFerryError):
        codec.read_to_holder(frame, "a peer")


@settings(deadline=None, max_examples=300)
@given(
    frame=st.binary(max_size=200)
    | st.tuples(
        st.sampled_from([Codec().encode(each) for each in (*TO_HOLDER, *TO_ASKER)]),
        st.integers(0, 400),
        st.integers(0, 255),
        st.booleans(),
    ).map(lambda drawn: _spoilt(*drawn))
)
def test_garbage_and_halves_are_refused_and_nothing_else_happens(frame: bytes) -> None:
    codec = Codec()
    refused: list[KVFerryError] = []
    for read in (codec.read_to_holder, codec.read_to_asker):
        try:
            assert isinstance(read(frame, "a peer"), ToHolder | ToAsker)
        except KVFerryError as error:
            refused.append(error)
    assert refused, "one frame is for both"
    assert {error.kind for error in refused} <= {ErrorKind.PROTOCOL, ErrorKind.COMPATIBILITY}
    assert all(error.remedy for error in refused)


def _spoilt(frame: bytes, at: int, byte: int, cut: bool) -> bytes:
    at %= len(frame)
    return frame[:at] if cut else frame[:at] + bytes([byte]) + frame[at + 1 :]


def test_another_version_is_named() -> None:
    codec = Codec()
    frame = codec.encode(Hello(WIRE_VERSION + 1, bytes(16), CARD))
    with pytest.raises(KVFerryError) as caught:
        codec.read_to_holder(frame, "a peer")
    assert caught.value.kind is ErrorKind.COMPATIBILITY
    assert str(WIRE_VERSION + 1) in caught.value.what


@pytest.mark.parametrize(
    "wrong",
    [
        {"keys": bytes(33)},
        {"keys": bytes(32 * (MAXIMUM_KEYS + 1))},
        {"number": -1},
        {"skip": -1},
        {"tails": [[bytes(31), 1]]},
        {"limit_tokens": 1 << 63},
    ],
    ids=["half a key", "too many keys", "negative number", "negative skip", "short tail", "too many tokens"],
)
def test_numbers_beyond_what_they_may_be_are_no_message(wrong: dict[str, object]) -> None:
    good = {"type": "ask", "number": 1, "keys": bytes(32), "tails": [], "skip": 0, "limit_tokens": 9}
    codec = Codec()
    codec.read_to_holder(msgspec.msgpack.encode(good), "a peer")
    with pytest.raises(KVFerryError):
        codec.read_to_holder(msgspec.msgpack.encode(good | wrong), "a peer")


@pytest.mark.parametrize("seconds", [-1.0, math.nan])
def test_a_time_that_is_none_is_no_message(seconds: float) -> None:
    codec = Codec()
    with pytest.raises(KVFerryError):
        codec.read_to_asker(codec.encode(Renewed(1, 1, seconds)), "a peer")


def test_a_frame_that_is_too_long_is_not_read() -> None:
    with pytest.raises(KVFerryError) as caught:
        Codec().read_to_holder(bytes(MAXIMUM_FRAME_BYTES + 1), "a peer")
    assert caught.value.kind is ErrorKind.PROTOCOL
