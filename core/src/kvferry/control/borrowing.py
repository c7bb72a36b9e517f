"""What other instances have of a prefix: found, asked for, and held while it comes up."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence

from attrs import define, field

from kvferry.api import Answer, Candidate, Grant, PeerAsk, PeerId, Refused
from kvferry.control.deadlines import NEVER
from kvferry.control.loans import BorrowSettings, Loan, Peer, Standing, facts_of
from kvferry.control.orders import ForgetOrder, ItemFault, MeetOrder, Order, OrderResult
from kvferry.control.outcomes import ChunkFacts
from kvferry.control.rises import Rises
from kvferry.control.seeking import Wanted
from kvferry.control.tells import FindHolders, Greet, Tell, TellAsk, TellDone, TellRenew


@define(eq=False)
class _Quest:
    """What one rise looks for at others."""

    id: int
    request: str
    rise: int
    salt: str
    keys: tuple[bytes, ...]
    tails: tuple[tuple[bytes, int], ...]
    limit_tokens: int
    skip: int
    """Chunks that it needs from nobody."""
    reached: int
    """As tokens, with what the engine has."""
    deadline: float
    found: bool = False
    """Whether the directory has answered."""
    candidates: deque[Candidate] = field(factory=deque)
    greeting: PeerId | None = None
    """Whose greeting it waits for."""
    asked: PeerId | None = None
    number: int = 0
    asked_at: float = 0.0
    abandoned: bool = False
    """Nobody wants the answer any more."""


class Borrowing:
    """The asker's half of reads between instances. Under the manager's lock; no thread, socket or clock.

    A rise that is open-ended begins a quest: who has more of the prefix (:class:`FindHolders`), are we agreed
    with it (:class:`Greet`), what does it lend (:class:`TellAsk`). A grant becomes a segment of the rise,
    which the workers read with :class:`~kvferry.control.orders.PullOrder`. Whatever was asked of a peer is
    said to be done with, on every way out.

    Messages may be lost, late, doubled: a quest ends at its deadline at the latest, and the rise goes on
    with what it has. :meth:`take` hands out what is to be sent, :attr:`orders` are for the workers.
    """

    def __init__(self, rises: Rises, settings: BorrowSettings, chunk_tokens: int) -> None:
        self.orders: list[Order] = []
        self.counts: Counter[str] = Counter()
        """Since the start: ``quests``, ``nobody``, ``granted``, ``chunks``, ``refused``, ``late``,
        ``untrue``, ``fetched``, ``failed``, ``paused``."""
        self._rises = rises
        rises.on_abandoned = self._abandon
        self._settings = settings
        self._chunk = chunk_tokens
        self._tells: list[Tell] = []
        self._last_quest = 0
        self._last_ask = 0
        self._quests: dict[int, _Quest] = {}
        self._asked: dict[int, _Quest] = {}
        self._loans: dict[int, Loan] = {}
        self._kept: dict[str, Loan] = {}
        """Those that requests have not taken yet."""
        self._peers: dict[str, Peer] = {}

    def begin(self, rise: int, wanted: Wanted, skip: int, reached: int, now: float) -> None:
        """Look for what comes behind ``skip`` chunks, and is more than ``reached`` tokens."""
        self._last_quest += 1
        deadline = now + self._settings.load_deadline
        # The request's own keys may become more meanwhile.
        keys = tuple(wanted.keys[: self._full(wanted)])
        tails = tuple(wanted.tail_keys(len(keys)))
        quest = _Quest(
            self._last_quest,
            wanted.request,
            rise,
            wanted.salt,
            keys,
            tails,
            wanted.limit_tokens,
            skip,
            reached,
            deadline,
        )
        self._quests[quest.id] = quest
        self.counts["quests"] += 1
        self._tells.append(FindHolders(quest.id, keys[skip:], deadline))

    @property
    def wait_seconds(self) -> float:
        """How long a request waits for what others have."""
        return self._settings.load_deadline

    @property
    def for_all(self) -> bool:
        """Whether what comes from peers is of use to other requests as well: it is in the first tier then."""
        return not self._settings.delay

    def worth(self, wanted: Wanted, skip: int, reached: int) -> bool:
        """Whether to look at others for what comes behind ``skip`` chunks and ``reached`` tokens."""
        if self._settings.delay and not wanted.asked:
            return False  # a lease would run while the request waits for its turn
        full = self._full(wanted)
        return skip < full and full * self._chunk - reached >= max(1, self._settings.min_load_tokens)

    def _full(self, wanted: Wanted) -> int:
        """How many full chunks it may have: a directory knows of no others."""
        return min(len(wanted.keys), wanted.limit_tokens // self._chunk)

    def take(self) -> list[Tell]:
        """What is to be sent, in this order."""
        tells, self._tells = self._tells, []
        return tells

    # Answers

    def found(self, quest_id: int, candidates: Sequence[Candidate], now: float) -> None:
        """Who may have it, the best first; nobody if the directory did not answer."""
        quest = self._quests.get(quest_id)
        if quest is None or quest.found:
            return
        quest.found = True
        least = max(quest.reached + 1, quest.reached + self._settings.min_load_tokens)
        quest.candidates.extend(
            each for each in candidates if (quest.skip + each.chunks) * self._chunk >= least
        )
        self._next_candidate(quest, now)

    def agreed(self, peer_id: PeerId, exports: Sequence[bytes], now: float) -> None:
        """The peer and we are agreed. ``exports`` are those of its channels, by rank."""
        peer = self._known(peer_id)
        if peer is None or peer.standing is not Standing.GREETING:
            return
        peer.standing = Standing.AGREED
        peer.until, peer.failures, peer.reason = NEVER, 0, ""
        self.orders.append(MeetOrder(peer_id.instance, peer_id.epoch, tuple(exports)))
        for quest in self._waiting_for(peer):
            quest.greeting = None
            if self._rises.goes_on(quest.rise):
                self._ask(quest, peer, now)
            else:
                self._give_up(quest)

    def lost(self, peer_id: PeerId, reason: str, now: float) -> None:
        """The peer cannot be reached, does not agree, or is gone."""
        peer = self._known(peer_id)
        if peer is not None:
            self._pause(peer, reason, now)

    def answered(self, peer_id: PeerId, answer: Answer, now: float) -> None:
        """What a peer says to an ask."""
        quest = self._asked.get(answer.number)
        if quest is None or quest.asked != peer_id:
            if isinstance(answer, Grant) and answer.number not in self._loans:
                self._tells.append(TellDone(peer_id, answer.number))  # too late: it may give it back
            return
        del self._asked[answer.number]
        quest.asked = None
        peer = self._known(peer_id)
        if quest.abandoned:
            del self._quests[quest.id]
            if peer is not None:
                peer.failures = 0
            if isinstance(answer, Grant):
                self._tells.append(TellDone(peer_id, answer.number))  # both were on their way
            return
        if isinstance(answer, Refused) or peer is None:
            self.counts["refused"] += 1
            self._next_candidate(quest, now)
            return
        if not self._is_true(quest, answer):
            self.counts["untrue"] += 1
            self._tells.append(TellDone(peer_id, answer.number))
            self._pause(peer, "it lends something else than it was asked for", now)
            self._next_candidate(quest, now)
            return
        peer.failures = 0
        self.counts["granted"] += 1
        self.counts["chunks"] += len(answer.chunks)
        loan = Loan(
            self,
            peer,
            answer.number,
            tuple(facts_of(chunk, quest.salt, quest.asked_at) for chunk in answer.chunks),
            {chunk.digest: slot for chunk, slot in zip(answer.chunks, answer.slots, strict=True)},
            quest.asked_at + answer.seconds,
            answer.seconds,
            quest.asked_at + answer.seconds / 2,
            region=answer.region,
            first=quest.skip,
            tokens=self._reach(quest, answer),
        )
        self._loans[loan.number] = loan
        del self._quests[quest.id]
        if not self._settings.delay:
            self._rises.extend(quest.rise, loan)
            return
        self.drop(quest.request)
        self._kept[quest.request] = loan
        self._rises.extend(quest.rise, None)

    def renewed(self, peer_id: PeerId, number: int, turn: int, seconds: float) -> None:
        """How long a loan lasts from the moment on in which its renewal was answered; 0 if it has ended."""
        loan = self._loans.get(number)
        if loan is None or (loan.peer.id, loan.turn) != (peer_id, turn) or loan.asked_at == NEVER:
            return
        loan.deadline = max(loan.deadline, loan.asked_at + seconds)
        loan.renew_at = loan.asked_at + seconds / 2 if seconds > loan.lasts / 2 else NEVER
        loan.asked_at = NEVER

    def take_kept(self, request: str) -> Loan | None:
        """What a peer lends the request, which releases it from here on."""
        return self._kept.pop(request, None)

    def keeps(self, request: str) -> bool:
        """Whether a peer lends it something that it has not taken yet. Any thread."""
        return request in self._kept

    def drop(self, request: str) -> None:
        """The request does not take what a peer lends it."""
        loan = self._kept.pop(request, None)
        if loan is not None:
            self.release(loan)

    # What happens meanwhile

    def fetched(self, loan: Loan, chunks: Sequence[ChunkFacts], result: OrderResult, now: float) -> None:
        """The end of an order to pull."""
        peer = loan.peer
        peer.fetching -= len(chunks)
        self.counts["fetched"] += len(chunks) - len(result.faults)
        self.counts["failed"] += len(result.faults)
        if any(place not in result.faults for place in range(len(chunks))):
            peer.failures = 0
        elif all(fault is not ItemFault.CANCELLED for fault in result.faults.values()):
            peer.failed_once(result.reason or "nothing came of an order to read")
        if peer.failures >= self._settings.failures:
            self._pause(peer, peer.reason, now)

    def release(self, loan: Loan) -> None:
        """Its rise has ended."""
        if self._loans.pop(loan.number, None) is not None:
            self._tells.append(TellDone(loan.peer.id, loan.number))

    def expire(self, now: float) -> None:
        """End what has run past its time, and renew what is needed for longer."""
        for quest in [each for each in self._quests.values() if each.deadline <= now]:
            self.counts["late"] += 1
            if quest.asked is not None:
                peer = self._known(quest.asked)
                self._take_back(quest)
                if peer is not None:
                    peer.failed_once("it did not answer")
                    if peer.failures >= self._settings.failures:
                        self._pause(peer, peer.reason, now)
            self._give_up(quest)
        for peer in list(self._peers.values()):
            if peer.until <= now and peer.standing is Standing.PAUSED and not peer.fetching:
                del self._peers[peer.id.instance]
            elif peer.until <= now and peer.standing is Standing.GREETING:
                self._pause(peer, "it did not answer the greeting", now)
        for loan in self._loans.values():
            if loan.renew_at <= now:
                loan.renew_at = now + loan.lasts / 8
                loan.asked_at = now
                loan.turn += 1
                self._tells.append(TellRenew(loan.peer.id, loan.number, loan.turn))

    def next_deadline(self) -> float:
        """When :meth:`expire` has something to do next; infinity if never."""
        return min(
            (
                *(quest.deadline for quest in self._quests.values()),
                *(peer.until for peer in self._peers.values() if not peer.fetching),
                *(loan.renew_at for loan in self._loans.values()),
            ),
            default=math.inf,
        )

    def give_up_all(self) -> None:
        """End all that is looked for, and what requests have not taken. What is on its way up stays until its
        rise has ended."""
        for request in list(self._kept):
            self.drop(request)
        for quest in list(self._quests.values()):
            self._take_back(quest)
            self._give_up(quest)

    def workers_lost(self) -> None:
        """No worker is left, and none of them knows a peer any more."""
        self.give_up_all()
        for loan in list(self._loans.values()):
            self.release(loan)
        self._peers.clear()
        self.orders.clear()

    @property
    def loans(self) -> int:
        """How many are held."""
        return len(self._loans)

    @property
    def seeks(self) -> bool:
        """Whether some answer is waited for."""
        return bool(self._quests)

    @property
    def at_rest(self) -> bool:
        """Whether nothing is looked for, held, or to be sent."""
        return not (self._quests or self._loans or self._tells or self.orders)

    def peers(self) -> dict[PeerId, tuple[Standing, str]]:
        """How those that were met are, each with the reason."""
        return {peer.id: (peer.standing, peer.reason) for peer in self._peers.values()}

    def check(self) -> None:
        """Audit; for tests."""
        for number, quest in self._asked.items():
            assert self._quests.get(quest.id) is quest, "an ask belongs to a quest that has ended"
            assert (quest.number, quest.asked is not None) == (number, True), "an ask is miscounted"
        for peer in self._peers.values():
            assert peer.fetching >= 0, "chunks under way are miscounted"
            greeted = peer.standing is Standing.GREETING
            assert greeted or not self._waiting_for(peer), "a quest waits for nothing"

    # One quest

    def _known(self, peer_id: PeerId) -> Peer | None:
        peer = self._peers.get(peer_id.instance)
        return peer if peer is not None and peer.id == peer_id else None

    def _next_candidate(self, quest: _Quest, now: float) -> None:
        while quest.candidates and self._rises.goes_on(quest.rise):
            candidate = quest.candidates.popleft()
            peer = self._meet(candidate, now)
            if peer is None:
                continue
            if peer.standing is Standing.AGREED:
                self._ask(quest, peer, now)
            else:
                quest.greeting = peer.id
            return
        self.counts["nobody"] += 1
        self._give_up(quest)

    def _meet(self, candidate: Candidate, now: float) -> Peer | None:
        """The peer, agreed with or being greeted; ``None`` if nothing is to be asked of it now."""
        peer = self._peers.get(candidate.peer.instance)
        if peer is not None and peer.id != candidate.peer:
            # It has started anew, or the directory does not know it yet: who comes last is right soon.
            self._pause(peer, "it has started anew", now)
            peer = None
        if peer is None:
            until = now + self._settings.load_deadline
            peer = Peer(candidate.peer, candidate.address, self._settings, self.orders, until=until)
            self._peers[candidate.peer.instance] = peer
            self._tells.append(Greet(candidate.peer, candidate.address))
        return None if peer.standing is Standing.PAUSED else peer

    def _ask(self, quest: _Quest, peer: Peer, now: float) -> None:
        self._last_ask += 1
        quest.asked, quest.number, quest.asked_at = peer.id, self._last_ask, now
        self._asked[quest.number] = quest
        ask = PeerAsk(
            number=quest.number,
            keys=quest.keys,
            tails=quest.tails,
            skip=quest.skip,
            limit_tokens=quest.limit_tokens,
        )
        self._tells.append(TellAsk(peer.id, ask))

    def _take_back(self, quest: _Quest) -> None:
        """Say of what was asked, and not answered, that it is done with."""
        if quest.asked is not None:
            del self._asked[quest.number]
            self._tells.append(TellDone(quest.asked, quest.number))
            quest.asked = None

    def _give_up(self, quest: _Quest) -> None:
        """The rise goes on with what it has."""
        if self._quests.pop(quest.id, None) is not None:
            self._rises.extend(quest.rise, None)

    def _abandon(self, rise: int) -> None:
        """Nobody waits for it any more: what was asked is taken back at once."""
        for quest in [each for each in self._quests.values() if each.rise == rise]:
            if quest.asked is None:
                del self._quests[quest.id]
            else:
                # What the peer answers is of no use, but whether it answers is.
                quest.abandoned = True
                self._tells.append(TellDone(quest.asked, quest.number))

    def _pause(self, peer: Peer, reason: str, now: float) -> None:
        if peer.standing is Standing.PAUSED:
            return
        if peer.standing is Standing.AGREED:
            self.orders.append(ForgetOrder(peer.id.instance, peer.id.epoch))
        self.counts["paused"] += 1
        peer.standing, peer.reason = Standing.PAUSED, reason
        peer.until = now + self._settings.pause_seconds
        waiting = self._waiting_for(peer)
        for quest in [each for each in self._quests.values() if each.asked == peer.id]:
            self._take_back(quest)
            waiting.append(quest)
        for quest in waiting:
            quest.greeting = None
            self._next_candidate(quest, now)

    def _waiting_for(self, peer: Peer) -> list[_Quest]:
        """For the end of its greeting."""
        return [quest for quest in self._quests.values() if quest.greeting == peer.id]

    def _reach(self, quest: _Quest, grant: Grant) -> int:
        """The end of what was asked for and is lent, as tokens from the start of the prefix."""
        last = grant.chunks[-1]
        end = (last.depth + 1) * self._chunk
        if last.depth == len(quest.keys):
            names = {(last.digest, last.tokens), *last.aliases}
            end = last.depth * self._chunk + max(tokens for name, tokens in names.intersection(quest.tails))
        return min(end, quest.limit_tokens)

    def _is_true(self, quest: _Quest, grant: Grant) -> bool:
        """Whether a grant is of the chunks behind those that were skipped, in their order. Behind all whole
        ones may be one that begins as the prompt ends."""
        chunks, keys = grant.chunks, quest.keys
        if not chunks or len(chunks) != len(grant.slots) or len(set(grant.slots)) != len(chunks):
            return False
        if min(grant.slots) < 0 or not 0 < grant.seconds < math.inf:
            return False
        for depth, chunk in enumerate(chunks, quest.skip):
            if depth > len(keys) or chunk.depth != depth or not chunk.seconds >= 0:
                return False
            if chunk.parent != (keys[depth - 1] if depth else None):
                return False
            if depth < len(keys):
                if (chunk.digest, chunk.tokens) != (keys[depth], self._chunk):
                    return False
            elif not {(chunk.digest, chunk.tokens), *chunk.aliases}.intersection(quest.tails):
                return False
        return True
