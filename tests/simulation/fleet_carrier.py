"""Messages between instances of a fleet: the plugin's own codecs, reception and publisher over a simulated
network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from attrs import define

from kvferry.api import Answer, Candidate, PeerAsk, PeerCard, PeerHost, PeerId
from kvferry_sharing_p2p.directory.answers import Found
from kvferry_sharing_p2p.directory.messages import WIRE_VERSION as DIRECTORY_VERSION
from kvferry_sharing_p2p.directory.messages import Answer as DirectoryAnswer
from kvferry_sharing_p2p.directory.messages import Codec as DirectoryCodec
from kvferry_sharing_p2p.directory.messages import Find, ToDirectory
from kvferry_sharing_p2p.directory.publisher import Identity, Publisher, PublisherOptions
from kvferry_sharing_p2p.network.finds import Finds, Unanswered
from kvferry_sharing_p2p.peers.carrier import FIND_SECONDS
from kvferry_sharing_p2p.peers.likeness import difference
from kvferry_sharing_p2p.peers.messages import (
    WIRE_VERSION,
    Codec,
    Declined,
    Done,
    Granted,
    Hello,
    Renew,
    Renewed,
    Stranger,
    ToHolder,
    Unwelcome,
    Welcome,
)
from kvferry_sharing_p2p.peers.reception import Reception
from kvferry_sharing_p2p.peers.translation import (
    answer_of,
    ask_message,
    card_message,
    card_of,
)

if TYPE_CHECKING:
    from tests.simulation.fleet_life import Life

HOLDERS, AT_ONCE = 3, 16
HELLO_SECONDS = 0.7
PUBLISHING = PublisherOptions(
    batch_keys=4,
    batch_seconds=0.05,
    backlog_keys=40,
    part_keys=5,
    parts_under_way=2,
    resend_seconds=0.5,
    hello_seconds=0.5,
)


@define(eq=False)
class Acquaintance:
    """A peer that was greeted. ``connection`` is of this greeting alone."""

    peer: PeerId
    address: bytes
    connection: bytes
    hello_at: float
    welcome: bool = False


class FleetCarrier:
    """A :class:`kvferry.api.PeerCarrier` of one life."""

    def __init__(self, life: Life) -> None:
        self.life = life
        self.host: PeerHost | None = None
        self.card: PeerCard | None = None
        self.reception: Reception | None = None
        self.publisher: Publisher | None = None
        self.finds = Finds()
        self.acquaintances: dict[PeerId, Acquaintance] = {}
        self._codec = Codec()
        self._directory = DirectoryCodec()
        self._greetings = 0

    # What the scheduler's side calls

    def open(self, host: PeerHost, card: PeerCard) -> None:
        self.host, self.card = host, card
        self.reception = Reception(host.desk, card)
        identity = Identity(
            instance=card.id.instance,
            epoch=card.id.epoch,
            namespace=card.namespace,
            ranks=len(card.ranks),
            address=self.life.address,
        )
        self.publisher = Publisher(identity, self, PUBLISHING)

    def walk(self, cursor: int, limit: int) -> tuple[bytes, int | None]:
        """For the publisher."""
        assert self.host is not None
        digests, behind = self.host.walk_servable(cursor, limit)
        return b"".join(digests), behind

    def served(self) -> None:
        assert self.host is not None
        assert self.publisher is not None
        while True:
            changes = self.host.take_servable(AT_ONCE)
            if changes.lost:
                self.publisher.changes_lost()
                continue
            if not changes.added and not changes.removed:
                return
            self.publisher.added(changes.added, self.life.clock())
            self.publisher.removed(changes.removed, self.life.clock())

    def find(self, quest: int, digests: Sequence[bytes], deadline: float) -> None:
        assert self.card is not None

        def told(outcome: Found | Unanswered) -> None:
            assert self.host is not None
            holders = outcome.holders if isinstance(outcome, Found) else ()
            candidates = [
                Candidate(peer=PeerId(each.instance, each.epoch), address=each.address, chunks=each.chunks)
                for each in holders
            ]
            if isinstance(outcome, Unanswered):
                self.life.world.saw(f"find: {outcome.value}")
            else:
                self.life.world.saw("find: somebody" if holders else "find: nobody")
            self.host.found(quest, candidates)

        number = self.finds.add(min(deadline, self.life.clock() + FIND_SECONDS), told)
        self._tell_directory(
            Find(
                version=DIRECTORY_VERSION,
                id=number,
                asker=self.life.id.instance,
                namespace=self.card.namespace,
                digests=b"".join(digests),
                limit=HOLDERS,
            )
        )

    def greet(self, peer: PeerId, address: bytes) -> None:
        for other in [each for each in self.acquaintances if each.instance == peer.instance]:
            del self.acquaintances[other]
        self._greetings += 1
        connection = self.life.id.epoch + self._greetings.to_bytes(4, "big")
        self.acquaintances[peer] = Acquaintance(peer, address, connection, self.life.clock())
        self.tick()

    def ask(self, peer: PeerId, ask: PeerAsk) -> None:
        self._tell(peer, ask_message(ask))

    def renew(self, peer: PeerId, number: int, turn: int) -> None:
        self._tell(peer, Renew(number, turn))

    def done(self, peer: PeerId, number: int) -> None:
        self._tell(peer, Done(number))

    def answer(self, peer: PeerId, answer: Answer) -> None:
        way = None if self.reception is None else self.reception.late_answer(peer, answer)
        if way is not None:
            self._say(*way)

    def close(self, deadline: float) -> None:
        if self.publisher is not None:
            for message in self.publisher.leave():
                self._tell_directory(message)
        self.finds.end_all(Unanswered.CLOSED)
        self.acquaintances.clear()
        self.publisher = self.reception = None

    # Time passes, frames come

    def tick(self) -> None:
        """Do what is due."""
        now = self.life.clock()
        self.finds.end_overdue(now)
        if self.publisher is not None and self.publisher.due() <= now:
            for message in self.publisher.poll(now):
                self._tell_directory(message)
        for known in list(self.acquaintances.values()):
            if not known.welcome and known.hello_at <= now and self.card is not None:
                known.hello_at = now + HELLO_SECONDS
                self._to(known, Hello(WIRE_VERSION, known.peer.epoch, card_message(self.card)))

    def hear_directory(self, frame: bytes) -> None:
        message = self._directory.read_from_directory(frame, "the directory")
        if isinstance(message, DirectoryAnswer):
            self.finds.end(message.id, message.found)
        elif self.publisher is not None:
            self.publisher.receive(message, self.life.clock())
            self.tick()

    def hear_asker(self, connection: bytes, frame: bytes) -> None:
        """Somebody asks over a connection of its own."""
        if self.reception is None:
            return
        answer = self.reception.answer(connection, frame)
        if answer is not None:
            self._say(connection, answer)

    def hear_holder(self, connection: bytes, frame: bytes) -> None:
        """A peer answers. What comes over a connection that was given up is heard by nobody."""
        known = next((each for each in self.acquaintances.values() if each.connection == connection), None)
        if known is None or self.host is None or self.card is None:
            return
        message = self._codec.read_to_asker(frame, known.peer.instance)
        match message:
            case Welcome():
                card = card_of(message.card)
                unlike = difference(self.card, card)
                if card.id != known.peer or unlike:
                    self.part(known, str(unlike or "it is another instance"))
                elif not known.welcome:
                    known.welcome = True
                    self.host.agreed(card)
            case Unwelcome():
                self.part(known, message.reason)
            case Stranger():
                self.part(known, "it does not know this instance any more")
            case Granted() | Declined():
                self.host.answered(known.peer, answer_of(message))
            case Renewed():
                self.host.renewed(known.peer, message.number, message.turn, message.seconds)

    def part(self, known: Acquaintance, reason: str) -> None:
        """The connection is of no use any more."""
        if self.acquaintances.get(known.peer) is known and self.host is not None:
            del self.acquaintances[known.peer]
            self.life.world.saw("parted")
            self.host.lost(known.peer, reason)

    # Frames go

    def _tell(self, peer: PeerId, message: ToHolder) -> None:
        known = self.acquaintances.get(peer)
        if known is not None:
            self._to(known, message)

    def _to(self, known: Acquaintance, message: ToHolder) -> None:
        frame = self._codec.encode(message)
        life, world = self.life, self.life.world

        def arrive() -> None:
            there = world.at(known.address)
            if there is not None and world.reach(life.id.instance, there.id.instance):
                there.process.do("asked", lambda: there.carrier.hear_asker(known.connection, frame))

        world.post(f"{life} says {type(message).__name__}", arrive)

    def _say(self, connection: bytes, frame: bytes) -> None:
        life, world = self.life, self.life.world

        def arrive() -> None:
            for there in world.lives:
                if connection.startswith(there.id.epoch) and world.reach(life.id.instance, there.id.instance):
                    there.process.do(
                        "answered", lambda there=there: there.carrier.hear_holder(connection, frame)
                    )

        world.post(f"{life} answers", arrive)

    def _tell_directory(self, message: ToDirectory) -> None:
        self.life.world.tell_directory(self.life, self._directory.encode(message))
