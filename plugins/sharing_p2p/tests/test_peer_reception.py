"""Who is answered, and with what: a peer that said hello and is alike, and nobody else."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from attrs import define, evolve, field

from kvferry.api import Answer, Grant, LentChunk, PeerAsk, PeerCard, PeerId, RankCard, Refusal, Refused
from kvferry_sharing_p2p.peers.likeness import difference
from kvferry_sharing_p2p.peers.messages import (
    WIRE_VERSION,
    Ask,
    Codec,
    Declined,
    Done,
    Granted,
    Hello,
    Renew,
    Renewed,
    Stranger,
    ToAsker,
    ToHolder,
    Unwelcome,
    Welcome,
)
from kvferry_sharing_p2p.peers.reception import MOST_GUESTS, Reception
from kvferry_sharing_p2p.peers.translation import answer_message, answer_of, card_message, card_of
from kvferry_sharing_p2p.rules import RULES

RANKS = (RankCard(shard=b"a", slot_bytes=64, export=b"x"), RankCard(shard=b"b", slot_bytes=64, export=b"y"))
HERE = PeerCard(
    id=PeerId("here", b"h" * 16),
    namespace=bytes(32),
    chunk_tokens=256,
    block_tokens=128,
    channel="tcp",
    ranks=RANKS,
)
THERE = evolve(HERE, id=PeerId("there", b"t" * 16), ranks=tuple(evolve(rank, export=b"z") for rank in RANKS))
ANSWER = Grant(
    number=1,
    chunks=(LentChunk(digest=bytes(32), parent=None, depth=0, tokens=256),),
    slots=(7,),
    tokens=256,
    seconds=30.0,
)


@define
class Cut:
    """What a rule's message says of one of two."""

    chunk_tokens: int


@define
class Desk:
    """Remembers who asked what."""

    answers: dict[int, Answer | None] = field(factory=dict)
    heard: list[tuple[Any, ...]] = field(factory=list)

    def ask(self, peer: PeerId, ask: PeerAsk) -> Answer | None:
        self.heard.append(("ask", peer, ask))
        return self.answers.get(ask.number, Refused(ask.number, Refusal.NOTHING))

    def renew(self, peer: PeerId, number: int) -> float:
        self.heard.append(("renew", peer, number))
        return 12.0

    def done(self, peer: PeerId, number: int) -> None:
        self.heard.append(("done", peer, number))


def say(reception: Reception, message: ToHolder, connection: bytes = b"1") -> ToAsker | None:
    codec = Codec()
    answer = reception.answer(connection, codec.encode(message))
    return None if answer is None else codec.read_to_asker(answer, "here")


def hello(card: PeerCard = THERE, to: bytes = HERE.id.epoch) -> Hello:
    return Hello(WIRE_VERSION, to, card_message(card))


def test_who_is_alike_is_welcome_and_answered() -> None:
    desk = Desk({1: ANSWER, 3: None})
    reception = Reception(desk, HERE)
    welcome = say(reception, hello())
    assert isinstance(welcome, Welcome)
    assert card_of(welcome.card) == HERE
    granted = say(reception, Ask(1, bytes(32), (), 0, 300))
    assert isinstance(granted, Granted)
    assert answer_of(granted) == ANSWER
    assert say(reception, Ask(2, bytes(32), (), 0, 300)) == Declined(2, Refusal.NOTHING)
    assert say(reception, Ask(3, bytes(32), (), 0, 300)) is None, "it is answered once"
    assert say(reception, Renew(1, 5)) == Renewed(1, 5, 12.0)
    assert say(reception, Done(1)) is None
    assert [name for name, peer, _ in desk.heard if peer == THERE.id] == ["ask"] * 3 + ["renew", "done"]


@pytest.mark.parametrize(
    ("other", "rule", "word"),
    [
        (evolve(THERE, namespace=b"n" * 32), "P2P022", "model"),
        (evolve(THERE, chunk_tokens=512), "P2P023", "256 and 512"),
        (evolve(THERE, block_tokens=64), "P2P024", "block"),
        (evolve(THERE, channel="local"), "P2P025", "tcp and local"),
        (evolve(THERE, ranks=RANKS[:1]), "P2P026", "ranks"),
        (evolve(THERE, ranks=(RANKS[0], evolve(RANKS[1], shard=b"c"))), "P2P027", "rank 1"),
        (evolve(THERE, ranks=(evolve(RANKS[0], slot_bytes=32), RANKS[1])), "P2P028", "64 and 32"),
    ],
    ids=["model", "chunk", "block", "channel", "fewer ranks", "shard", "slot"],
)
def test_who_differs_is_told_in_what_and_answered_nothing(other: PeerCard, rule: str, word: str) -> None:
    desk = Desk()
    reception = Reception(desk, other)
    refusal = say(reception, hello(HERE, other.id.epoch))
    assert isinstance(refusal, Unwelcome)
    assert refusal.rule == rule
    assert word in refusal.reason
    unlike = difference(other, HERE)
    assert unlike is not None
    assert unlike.rule == rule, "which is which does not matter"
    assert say(reception, Ask(1, bytes(32), (), 0, 300)) == Stranger()
    assert not desk.heard


def test_a_hello_to_an_earlier_life_is_refused() -> None:
    reception = Reception(Desk(), HERE)
    refusal = say(reception, hello(to=b"o" * 16))
    assert isinstance(refusal, Unwelcome)
    assert refusal.rule == "P2P021"
    assert say(reception, Renew(1, 1)) == Stranger()


def test_connections_are_told_apart() -> None:
    desk = Desk()
    reception = Reception(desk, HERE)
    say(reception, hello(), b"1")
    assert say(reception, Done(1), b"2") == Stranger()
    assert not desk.heard


def test_an_answer_that_comes_later_goes_where_the_peer_was_heard_last() -> None:
    desk = Desk({1: None})
    reception = Reception(desk, HERE)
    assert reception.late_answer(THERE.id, ANSWER) is None, "nobody is there"
    say(reception, hello(), b"1")
    assert say(reception, Ask(1, bytes(32), (), 0, 300), b"1") is None
    say(reception, hello(), b"2")
    staged = evolve(ANSWER, region="staging")
    way = reception.late_answer(THERE.id, staged)
    assert way is not None
    connection, frame = way
    assert connection == b"1", "no word of it has come over the other one"
    message = Codec().read_to_asker(frame, "here")
    assert isinstance(message, Granted)
    assert answer_of(message) == staged
    say(reception, Renew(1, 1), b"2")
    assert reception.late_answer(THERE.id, ANSWER) == (b"2", Codec().encode(answer_message(ANSWER)))


def test_garbage_is_answered_and_forgotten() -> None:
    reception = Reception(Desk(), HERE)
    answer = reception.answer(b"1", b"\xff\x00 no message")
    assert answer is not None
    assert isinstance(Codec().read_to_asker(answer, "here"), Unwelcome)
    assert reception.rejected == 1
    assert isinstance(say(reception, hello()), Welcome)


def test_no_flood_of_connections_is_remembered_for_ever() -> None:
    reception = Reception(Desk(), HERE)
    for number in range(MOST_GUESTS + 2):
        say(reception, hello(), b"%d" % number)
    assert say(reception, Done(1), b"0") == Stranger()
    assert say(reception, Done(1), b"%d" % MOST_GUESTS) is None
    for number in range(MOST_GUESTS + 2, 2 * MOST_GUESTS + 4):
        say(reception, hello(), b"%d" % number)
    assert reception.late_answer(THERE.id, ANSWER) is None


def test_a_hello_of_another_release_is_refused_with_its_rule() -> None:
    message = msgspec.structs.replace(hello(), version=WIRE_VERSION + 1)
    refusal = say(Reception(Desk(), HERE), message)
    assert isinstance(refusal, Unwelcome)
    assert refusal.rule == "P2P020"
    assert f"version {WIRE_VERSION + 1}" in refusal.reason


def test_peers_are_judged_by_the_rules_that_files_are_judged_by() -> None:
    mine, theirs = evolve(HERE, chunk_tokens=128), evolve(THERE, channel="local", chunk_tokens=512)
    unlike = difference(mine, theirs)
    assert unlike is not None
    rule = next(rule for rule in RULES if rule.id == unlike.rule)
    assert str(unlike) == f"{rule.id}: " + rule.message.format(
        one=Cut(128),
        other=Cut(512),
    )


def test_who_is_alike_but_for_names_and_exports_differs_in_nothing() -> None:
    assert difference(HERE, THERE) is None
