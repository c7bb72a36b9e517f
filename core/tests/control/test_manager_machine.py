"""The manager against a reference made of dictionaries and full searches, and against a memory that
remembers who wrote what."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

from attrs import define, field
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvferry.api import EvictionPolicy, QuotaPolicy
from kvferry.control.events import ClearedFact, StoredFact
from kvferry.control.lru import LRU
from kvferry.control.manager import CacheManager
from kvferry.control.outcomes import ChunkWrite, LeaseOutcome, PinOutcome, WriteOutcome
from kvferry.testing.owners import OwnersApart

CHUNK, CAPACITY = 3, 9
LEASE, WRITE = 10.0, 14.0
PINNABLE = CAPACITY // 2
SLOT_BYTES = 10
NEVER = float("inf")
Tokens = tuple[int, ...]
Key = tuple[str, Tokens]


def digest(key: Key) -> bytes:
    return hashlib.blake2b(repr(key).encode(), digest_size=32).digest()


def parts(salt: str, prompt: Tokens) -> list[Key]:
    """Keys of the chunks of a prompt, a tail included."""
    return [(salt, prompt[: min(at + CHUNK, len(prompt))]) for at in range(0, len(prompt), CHUNK)]


def salt_of(key: Key) -> str:
    """A key's first part names the salt and, behind a plus, the adapter."""
    return key[0].partition("+")[0]


def model_of(key: Key) -> str:
    return key[0].partition("+")[2]


@define(eq=False)
class PinOfOne:
    """A pin, by its salt and name."""

    key: tuple[str, str]
    end: float


@define(eq=False)
class Node:
    """A chunk, known by its salt and all tokens up to its end."""

    key: Key
    slot: int
    state: str = "reserved"
    stamp: int = 0
    leases: int = 0
    end: float = NEVER
    pins: set[PinOfOne] = field(factory=set)

    @property
    def depth(self) -> int:
        return (len(self.key[1]) - 1) // CHUNK

    @property
    def parent(self) -> Key | None:
        return (self.key[0], self.key[1][: self.depth * CHUNK]) if self.depth else None

    @property
    def full(self) -> bool:
        return len(self.key[1]) % CHUNK == 0

    @property
    def partials(self) -> list[Key]:
        salt, tokens = self.key
        start = self.depth * CHUNK
        end = len(tokens) if not self.full else len(tokens) - 1
        return [(salt, tokens[:at]) for at in range(start + 1, end + 1)]


@define(eq=False)
class Reader:
    owner: str
    deadline: float
    nodes: list[Node]
    prompt: Tokens
    tokens: int
    in_flight: bool = False
    owned: bool = True


@define(eq=False)
class Writer:
    owner: str
    deadline: float
    nodes: dict[int, Node]
    given_up: bool = False
    owned: bool = True


@define
class Model:
    """What the manager should do, said in the simplest way."""

    usable: int = 0
    clock: int = 0
    nodes: list[Node] = field(factory=list)
    partial: dict[Key, Node] = field(factory=dict)
    pins: dict[tuple[str, str], PinOfOne] = field(factory=dict)
    ending: list[PinOfOne] = field(factory=list)
    quotas: dict[str, int | None] | None = None
    """Slots by owner; ``*`` for the others."""

    def allowed(self, salt: str) -> int | None:
        if self.quotas is None:
            return None
        return self.quotas[salt] if salt in self.quotas else self.quotas["*"]

    def held(self, salt: str) -> int:
        return sum(salt_of(node.key) == salt for node in self.nodes)

    def before(self, node: Node) -> Node | None:
        return self.at(node.parent, "reserved", "written", "visible")

    def chain(self, node: Node) -> list[Node]:
        """The node and all before it, the head first."""
        found = [node]
        while (parent := self.before(found[0])) is not None:
            found.insert(0, parent)
        return found

    def prolong(self, node: Node | None, end: float) -> None:
        while node is not None and node.end < end:
            node.end = end
            node = self.before(node)

    def pinned(self) -> int:
        return sum(bool(node.pins) for node in self.nodes)

    def cover(self, pin: PinOfOne, nodes: list[Node]) -> bool:
        room = PINNABLE - self.pinned()
        for node in nodes:
            if not node.pins:
                if room <= 0:
                    return False
                room -= 1
            node.pins.add(pin)
        return True

    def at(self, key: Key | None, *states: str) -> Node | None:
        found = [n for n in self.nodes if n.key == key and n.state in states]
        assert len(found) < 2
        return found[0] if found else None

    def behind(self, node: Node) -> list[Node]:
        live = ("reserved", "written", "visible")
        return [n for n in self.nodes if n.parent == node.key and n.state in live and node.full]

    def free(self) -> int:
        return self.usable - len(self.nodes)

    def count(self, *states: str) -> int:
        return sum(node.state in states for node in self.nodes)

    def touch(self, nodes: Iterable[Node]) -> None:
        self.clock += 1
        for node in nodes:
            if node.state == "visible":
                node.stamp = self.clock

    def evict(self, need: int, protected: Iterable[Node] = (), owner: str | None = None) -> int:
        gone = 0
        while gone < need:
            leaves = [
                node
                for node in self.nodes
                if node.state == "visible"
                and not node.leases
                and not node.pins
                and owner in (None, salt_of(node.key))
                and not self.behind(node)
                and node not in protected
            ]
            if not leaves:
                break
            self.forget(min(leaves, key=lambda node: node.stamp))
            gone += 1
        return gone

    def forget(self, node: Node) -> None:
        self.hide(node)
        self.nodes.remove(node)

    def hide(self, node: Node) -> None:
        self.partial = {key: held for key, held in self.partial.items() if held is not node}

    def cut(self, node: Node) -> None:
        if node.state not in ("reserved", "written", "visible"):
            return
        for successor in self.behind(node):
            self.cut(successor)
        node.pins = set()
        if node.state == "visible":
            self.hide(node)
            node.state = "retiring"
        elif node.state == "reserved":
            node.state = "quarantined"
        if node.state == "written" or (node.state == "retiring" and not node.leases):
            self.forget(node)

    def publish(self, node: Node) -> None:
        """A node that was written, when everything before it is visible."""
        if node.parent is not None and self.at(node.parent, "visible") is None:
            return
        if not node.full and node.key in self.partial:
            self.nodes.remove(node)
            self.take_over(node, self.partial[node.key])
            return
        for key in node.partials:
            held = self.partial.get(key)
            if held is not None and held.key == key:
                pins = set(held.pins)
                self.cut(held)
                held.pins = pins
                self.take_over(held, node)
                held.pins = set()
        self.partial.update(dict.fromkeys(node.partials, node))
        node.state = "visible"
        self.touch([node])
        for successor in self.behind(node):
            if successor.state == "written":
                self.publish(successor)

    def take_over(self, tail: Node, longer: Node) -> None:
        """What was asked for a tail goes on for the chunk that takes its place."""
        self.prolong(longer, tail.end)
        longer.pins |= tail.pins

    def let_go(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            node.leases -= 1
            if node.state == "retiring" and not node.leases:
                self.nodes.remove(node)

    def resident(self, key: Key) -> Node | None:
        full = len(key[1]) % CHUNK == 0
        return self.at(key, "visible") if full else self.partial.get(key)


salts = st.sampled_from(["", "", "", "tenant", "+adapter"])
lives = st.sampled_from([None, None, None, 4.0, 11.0, 30.0])
# Four texts that part inside a chunk, at the end of one, and at once; a prompt is a beginning.
TEXTS = ((0,) * 11, (0,) * 4 + (1,) * 7, (0,) * 6 + (2,) * 5, (3,) * 11)
prompts = st.builds(lambda text, end: TEXTS[text][:end], st.integers(0, 3), st.integers(1, 11))
owners = st.sampled_from(["a", "b"])


class ManagerMachine(RuleBasedStateMachine):
    quotas: Mapping[str, int | None] | None = None

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        policy: EvictionPolicy = LRU()
        apart: QuotaPolicy | None = None
        if self.quotas is not None:
            in_bytes = {
                owner: None if slots is None else slots * SLOT_BYTES + 3
                for owner, slots in self.quotas.items()
            }
            default = in_bytes.pop("*")
            policy = apart = OwnersApart(in_bytes, default)
        self.model = Model(quotas=None if self.quotas is None else dict(self.quotas))
        self.manager = CacheManager(
            capacity=CAPACITY,
            chunk_tokens=CHUNK,
            block_tokens=1,
            policy=policy,
            lease_seconds=LEASE,
            write_seconds=WRITE,
            quotas=apart,
            slot_bytes=SLOT_BYTES,
            max_pinned=0.5,
            events=12,
        )
        self.index: dict[bytes, bytes | None] = {}
        """What somebody knows who applies every fact."""
        self.readers: dict[int, Reader] = {}
        self.writers: dict[int, Writer] = {}
        self.ended: list[int] = []
        self.memory: dict[int, Key] = {}
        self.grow(6)

    @rule(slots=st.integers(1, CAPACITY + 3))
    def grow(self, slots: int) -> None:
        self.manager.grow(slots)
        self.model.usable = max(self.model.usable, min(slots, CAPACITY))

    # Writing

    @rule(owner=owners, salt=salts, prompt=prompts, ttl=lives)
    def store(self, owner: str, salt: str, prompt: Tokens, ttl: float | None) -> None:
        number = self.reserve(owner, salt, prompt, 0, ttl)
        if number is not None:
            self.result(number, set())

    @rule(owner=owners, salt=salts, prompt=prompts)
    def store_another(self, owner: str, salt: str, prompt: Tokens) -> None:
        self.store(owner, salt, prompt, None)

    @rule(owner=owners, salt=salts, prompt=prompts, skip=st.sampled_from([0, 0, 0, 1]), ttl=lives)
    def begin_store(self, owner: str, salt: str, prompt: Tokens, skip: int, ttl: float | None) -> None:
        self.reserve(owner, salt, prompt, skip, ttl)

    def reserve(self, owner: str, salt: str, prompt: Tokens, skip: int, ttl: float | None) -> int | None:
        end = NEVER if ttl is None else self.now + ttl
        nodes = [Node(key, -1) for key in parts(salt, prompt)][skip:]
        writes = [
            ChunkWrite(
                digest(node.key),
                None if node.parent is None else digest(node.parent),
                node.depth,
                len(node.key[1]) - node.depth * CHUNK,
                tuple(
                    (digest(key), len(key[1]) - node.depth * CHUNK)
                    for key in node.partials
                    if key != node.key
                ),
            )
            for node in nodes
        ]
        keys = {digest(node.key): node.key for node in nodes}
        answer = self.manager.reserve(
            owner,
            salt.partition("+")[0],
            writes,
            self.now,
            model=salt.partition("+")[2],
            ttl=ttl,
            content=lambda write: keys[write.digest],
        )
        expected = self._expected(nodes, end)
        assert [item.outcome for item in answer.items] == expected
        granted = {}
        for index, (node, item) in enumerate(zip(nodes, answer.items, strict=True)):
            if item.outcome is WriteOutcome.GRANTED:
                node.slot = item.slot
                self.model.nodes.append(node)
                node.end = end
                self.model.prolong(self.model.before(node), end)
                granted[index] = node
        assert (answer.id is None) == (not granted)
        if answer.id is not None:
            self.writers[answer.id] = Writer(owner, self.now + WRITE, granted)
        return answer.id

    def _ended(self, node: Node | None) -> bool:
        return node is not None and node.end <= self.now

    def _expected(self, nodes: list[Node], end: float) -> list[WriteOutcome]:
        model = self.model
        outcomes: list[WriteOutcome | None] = []
        planned: set[Key | None] = set()
        protected: list[Node | None] = []
        for node in nodes:
            pending = ("reserved", "written")
            protected += [model.resident(node.key), model.at(node.parent, "visible")]
            before = model.at(node.parent, "visible", *pending)
            present = model.resident(node.key) or model.at(node.key, *pending)
            if present is not None and self._ended(model.before(present)):
                outcomes.append(WriteOutcome.NO_PARENT)
            elif present is not None:
                visible = present.state == "visible"
                outcomes.append(WriteOutcome.RESIDENT if visible else WriteOutcome.BUSY)
                model.prolong(present, end)
            elif node.depth and (before is None or self._ended(before)) and node.parent not in planned:
                outcomes.append(WriteOutcome.NO_PARENT)
            else:
                planned.add(node.key)
                outcomes.append(None)
        stands = [node for node in protected if node]
        if outcomes.count(None):
            self._within_quota(salt_of(nodes[0].key), outcomes, stands)
        need = outcomes.count(None) - model.free()
        model.evict(need, stands)
        room = model.free()
        answers = []
        for outcome in outcomes:
            if outcome is None:
                answers.append(WriteOutcome.GRANTED if room > 0 else WriteOutcome.NO_ROOM)
                room -= 1
            else:
                answers.append(outcome)
        return answers

    def _within_quota(self, salt: str, outcomes: list[WriteOutcome | None], protected: list[Node]) -> None:
        allowed = self.model.allowed(salt)
        if allowed is None:
            return
        wanted = outcomes.count(None)
        self.model.evict(self.model.held(salt) - max(0, allowed - wanted), protected, salt)
        left = allowed - self.model.held(salt)
        for item, outcome in enumerate(outcomes):
            if outcome is None:
                if left <= 0:
                    outcomes[item] = WriteOutcome.OVER_QUOTA
                left -= 1

    @precondition(lambda self: self.writers)
    @rule(data=st.data(), how=st.sampled_from(["good", "some", "renew", "abort", "abandon"]))
    def end_store(self, data: st.DataObject, how: str) -> None:
        number = data.draw(st.sampled_from(sorted(self.writers)))
        writer = self.writers[number]
        if how == "good":
            self.result(number, set())
        elif how == "some":
            items = st.sampled_from(sorted(writer.nodes))
            self.result(number, data.draw(st.sets(items, min_size=1, max_size=2)))
        elif how == "renew":
            late = LeaseOutcome.LATE if writer.given_up else LeaseOutcome.OK
            assert self.manager.renew(number, self.now) is late
            writer.deadline = self.now + WRITE
        else:
            self.give_up(number, how)

    def result(self, number: int, failed: set[int]) -> None:
        writer = self.writers.pop(number)
        # The worker writes whatever became of the reservation meanwhile.
        for node in writer.nodes.values():
            self.memory[node.slot] = node.key
        result = self.manager.complete(number, set(writer.nodes) - failed)
        self._completed(writer, failed)
        late = LeaseOutcome.LATE if writer.given_up else LeaseOutcome.OK
        assert result.outcome is late
        if writer.given_up:
            assert result.visible == 0
        self.ended.append(number)

    def _completed(self, writer: Writer, failed: set[int]) -> None:
        for item, node in sorted(writer.nodes.items()):
            if node.state == "quarantined":
                self.model.nodes.remove(node)
            elif item in failed:
                self.model.cut(node)
                self.model.nodes.remove(node)
            else:
                node.state = "written"
                self.model.publish(node)

    def give_up(self, number: int, how: str) -> None:
        writer = self.writers[number]
        late = writer.given_up
        if how == "abort":
            result = self.manager.abort(number).outcome
            self._completed(self.writers.pop(number), set(writer.nodes))
            self.ended.append(number)
        else:
            result = self.manager.abandon(number)
            self._abandon(writer)
        assert result is (LeaseOutcome.LATE if late else LeaseOutcome.OK)

    def _abandon(self, writer: Writer) -> None:
        writer.given_up = True
        writer.owned = False
        for node in writer.nodes.values():
            self.model.cut(node)

    # Reading

    @rule(owner=owners, salt=salts, prompt=prompts)
    def match_all(self, owner: str, salt: str, prompt: Tokens) -> None:
        self.match(owner, salt, prompt, 1, 2)

    @rule(
        owner=owners,
        salt=salts,
        prompt=prompts,
        spare=st.integers(0, 2),
        slice_keys=st.integers(1, 4),
    )
    def match(self, owner: str, salt: str, prompt: Tokens, spare: int, slice_keys: int) -> None:
        limit = len(prompt) - spare
        full = [key for key in parts(salt, prompt) if len(key[1]) % CHUNK == 0]

        def tail_keys(index: int) -> list[tuple[bytes, int]]:
            chunk = prompt[index * CHUNK : (index + 1) * CHUNK]
            return [
                (digest((salt, prompt[: index * CHUNK + size])), size)
                for size in range(min(len(chunk), CHUNK - 1), 0, -1)
            ]

        cursor = self.manager.match_in_slices(
            owner, [digest(key) for key in full], tail_keys, limit, slice_keys
        )
        while cursor.advance(self.now):
            self.manager.check()
        match = cursor.match
        found: list[Node] = []
        tokens = 0
        for key in full:
            node = self.model.at(key, "visible")
            if node is None or len(key[1]) > limit or self._ended(node):
                break
            found.append(node)
            tokens = len(key[1])
        for end in range(min(limit, tokens + CHUNK - 1), tokens, -1):
            node = self.model.partial.get((salt, prompt[:end]))
            if node is not None and not self._ended(node):
                found.append(node)
                tokens = end
                break
        assert match.tokens == tokens <= max(limit, 0)
        assert match.slots == tuple(node.slot for node in found)
        assert sum(used for _, used in match.pieces) == tokens
        assert (match.lease is None) == (not found)
        if match.lease is None:
            return
        self.model.touch(found)
        for node in found:
            node.leases += 1
        self.readers[match.lease] = Reader(owner, self.now + LEASE, found, prompt, tokens)
        self._bytes_are_right(match.lease)

    def _bytes_are_right(self, number: int) -> None:
        """What a worker would read under this lease now."""
        reader = self.readers[number]
        for at, node in enumerate(reader.nodes):
            end = min((at + 1) * CHUNK, reader.tokens)
            assert self.memory[node.slot] == node.key
            assert node.key[1][:end] == reader.prompt[:end]

    @precondition(lambda self: self.readers)
    @rule(data=st.data(), how=st.sampled_from(["release", "begin", "finish", "renew"]))
    def read(self, data: st.DataObject, how: str) -> None:
        number = data.draw(st.sampled_from(sorted(self.readers)))
        reader = self.readers[number]
        self._bytes_are_right(number)
        if how == "begin":
            assert self.manager.begin_load(number) is LeaseOutcome.OK
            reader.in_flight = True
        elif how == "renew":
            assert self.manager.renew(number, self.now) is LeaseOutcome.OK
            reader.deadline = self.now + LEASE
        elif how == "release" and reader.in_flight:
            assert self.manager.release(number) is LeaseOutcome.DEFERRED
        else:
            end = self.manager.release if how == "release" else self.manager.finish_load
            assert end(number) is LeaseOutcome.OK
            self._read_ended(number)

    def _read_ended(self, number: int) -> None:
        self.model.let_go(self.readers.pop(number).nodes)
        self.ended.append(number)

    @precondition(lambda self: self.ended)
    @rule(data=st.data())
    def late_calls_change_nothing(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(self.ended))
        before = self.manager.stats()
        for call in (self.manager.release, self.manager.begin_load, self.manager.finish_load):
            assert call(number) is LeaseOutcome.ENDED
        assert self.manager.complete(number, {0}).outcome is LeaseOutcome.ENDED
        assert self.manager.abandon(number) is LeaseOutcome.ENDED
        assert self.manager.renew(number, self.now) is LeaseOutcome.ENDED
        assert self.manager.release(number + 10_000) is LeaseOutcome.UNKNOWN
        assert self.manager.stats() == before

    # Ends

    @rule(
        how=st.sampled_from(["time", "time", "time", "owner", "owner", "workers"]),
        owner=owners,
        keep=st.booleans(),
        seconds=st.sampled_from([1.0, 5.0, 12.0]),
        limit=st.sampled_from([None, None, 1, 2]),
    )
    def something_ends(self, how: str, owner: str, keep: bool, seconds: float, limit: int | None) -> None:
        if how == "owner":
            self.owner_ends(owner, keep)
        elif how == "time":
            self.time_passes(seconds, limit)
        else:
            self.workers_die()

    def owner_ends(self, owner: str, keep: bool) -> None:
        self.manager.release_owner(owner, keep_writes=keep)
        for number, reader in list(self.readers.items()):
            if reader.owner == owner and reader.owned:
                if reader.in_flight:
                    reader.owned = False
                else:
                    self._read_ended(number)
        for _, writer in sorted(self.writers.items()):
            if writer.owner == owner and writer.owned:
                writer.owned = False
                if not keep:
                    self._abandon(writer)

    @rule(seconds=st.sampled_from([2.0, 5.0]))
    def time_passes_unseen(self, seconds: float) -> None:
        """Nobody calls ``expire``; what has ended is not found all the same."""
        self.now += seconds

    def time_passes(self, seconds: float, limit: int | None) -> None:
        self.now += seconds
        expired = self.manager.expire(self.now, limit)
        pins = set(expired.pins)
        for _ in range(1000):
            if self.manager.next_deadline() > self.now:
                break
            assert limit is not None, "something is left although there was no limit"
            self.manager.check()
            pins |= set(self.manager.expire(self.now, limit).pins)
        else:
            raise AssertionError("expire() never comes to an end")
        self._pins_end(pins)
        reads = {
            number
            for number, reader in self.readers.items()
            if reader.deadline <= self.now and not reader.in_flight
        }
        writes = {
            number
            for number, writer in self.writers.items()
            if writer.deadline <= self.now and not writer.given_up
        }
        assert set(expired.leases) == reads
        assert set(expired.reservations) == writes
        for number in reads:
            self._read_ended(number)
        for number in sorted(writes, key=lambda n: (self.writers[n].deadline, n)):
            self._abandon(self.writers[number])
        for node in list(self.model.nodes):
            if node in self.model.nodes and self._ended(node):
                self.model.cut(node)

    def _pins_end(self, told: set[tuple[str, str]]) -> None:
        due = {key for key, pin in self.model.pins.items() if pin.end <= self.now}
        assert told == due
        self.model.ending += [self.model.pins.pop(key) for key in due]
        for node in self.model.nodes:
            node.pins -= set(self.model.ending)
        self.model.ending.clear()

    # Pins

    @rule(
        salt=salts,
        prompt=prompts,
        name=st.sampled_from(["p", "q"]),
        seconds=st.sampled_from([3.0, 8.0, 25.0]),
    )
    def pin(self, salt: str, prompt: Tokens, name: str, seconds: float) -> None:
        model = self.model
        key = (salt, prompt)
        node = model.resident(key) or model.at(key, "reserved", "written")
        outcome = self.manager.pin(salt_of(key), name, digest(key), seconds, self.now)
        if node is None:
            assert outcome is PinOutcome.ABSENT
            return
        if model.pinned() >= PINNABLE and not node.pins:
            assert outcome is PinOutcome.NO_ROOM
            return
        pin = model.pins.setdefault((salt_of(key), name), PinOfOne((salt_of(key), name), 0.0))
        pin.end = max(pin.end, self.now + seconds)
        chain = [each for each in model.chain(node) if pin not in each.pins]
        all_of_it = model.cover(pin, chain)
        assert outcome is (PinOutcome.PINNED if all_of_it else PinOutcome.NO_ROOM)

    @rule(
        how=st.sampled_from(["extend", "end"]),
        name=st.sampled_from(["p", "q"]),
        salt=st.sampled_from([None, "", "tenant"]),
    )
    def change_pin(self, how: str, name: str, salt: str | None) -> None:
        found = [pin for key, pin in self.model.pins.items() if key[1] == name and salt in (None, key[0])]
        if how == "extend":
            assert self.manager.extend_pin(name, 9.0, self.now, salt) == len(found)
            for pin in found:
                pin.end = max(pin.end, self.now + 9.0)
            return
        assert self.manager.unpin(name, salt) == len(found)
        for pin in found:
            self.model.ending.append(self.model.pins.pop(pin.key))

    # Events

    @rule(limit=st.integers(1, 5))
    def listen(self, limit: int) -> None:
        """Whoever applies the facts in order knows a chunk only with all before it, and none that is
        gone; and all that are there unless facts were lost."""
        keys = {digest(node.key): node for node in self.model.nodes}
        while facts := self.manager.take_events(limit):
            assert len(facts) <= limit
            for fact in facts:
                if isinstance(fact, ClearedFact):
                    self.index.clear()
                elif isinstance(fact, StoredFact):
                    assert fact.parent is None or fact.parent in self.index
                    assert (fact.parent is None) == (fact.depth == 0)
                    assert fact.digest not in self.index
                    self.index[fact.digest] = fact.parent
                    if (node := keys.get(fact.digest)) is not None:
                        assert fact.content == node.key
                        assert fact.parent == (None if node.parent is None else digest(node.parent))
                        assert (fact.salt, fact.model) == (salt_of(node.key), model_of(node.key))
                else:
                    del self.index[fact.digest]
                    assert fact.digest not in self.index.values()
        there = {digest(n.key) for n in self.model.nodes if n.state == "visible" and n.full}
        assert set(self.index) <= there
        assert self.manager.events_behind == (set(self.index) != there)

    @rule(salt=salts, prompt=prompts, start=st.integers(0, 1))
    def tell_again(self, salt: str, prompt: Tokens, start: int) -> None:
        keys = [key for key in parts(salt, prompt) if len(key[1]) % CHUNK == 0]
        self.manager.tell([digest(key) for key in keys], start, lambda index: keys[index])

    def workers_die(self) -> None:
        self.manager.worker_lost()
        for number, writer in sorted(self.writers.items()):
            self._completed(writer, set(writer.nodes))
            self.ended.append(number)
        self.writers.clear()
        for number in [n for n, reader in self.readers.items() if reader.in_flight]:
            self._read_ended(number)

    # Contents

    @rule(count=st.integers(0, 4))
    def evict(self, count: int) -> None:
        assert self.manager.evict(count) == self.model.evict(count)

    @rule(
        how=st.sampled_from(["drop", "drop", "drop", "clear", "clear", "slices", "cursor"]),
        only=st.sampled_from([(None, None), ("", None), ("tenant", None), ("", ""), (None, "adapter")]),
        salt=salts,
        prompt=prompts,
        limit=st.integers(1, 2),
    )
    def something_goes(
        self, how: str, only: tuple[str | None, str | None], salt: str, prompt: Tokens, limit: int
    ) -> None:
        if how == "drop":
            self.drop(salt, prompt)
        elif how == "slices":
            self.clear_in_slices(*only, limit)
        elif how == "cursor":
            self.clear_with_a_cursor(*only, limit)
        else:
            self.clear(*only)

    def _chosen(self, salt: str | None, model: str | None) -> list[Node]:
        return [
            node
            for node in self.model.nodes
            if salt in (None, salt_of(node.key))
            and model in (None, model_of(node.key))
            and node.state in ("reserved", "written", "visible")
        ]

    def _cut_all(self, salt: str | None, model: str | None) -> None:
        while chosen := self._chosen(salt, model):
            self.model.cut(chosen[0])

    def clear(self, salt: str | None, model: str | None) -> None:
        visible = [node for node in self._chosen(salt, model) if node.state == "visible"]
        doomed = len(self._chosen(salt, model)) - len(visible)
        gone = self.manager.clear(salt, model=model)
        assert gone.kept == sum(n.leases > 0 for n in visible)
        assert gone.removed == len(visible) - gone.kept
        assert gone.doomed == doomed
        self._cut_all(salt, model)

    def clear_in_slices(self, salt: str | None, model: str | None, limit: int) -> None:
        while True:
            gone = self.manager.clear(salt, limit, model=model)
            self.manager.check()
            assert gone.removed + gone.kept <= limit
            if not gone.removed + gone.kept:
                break
        self._cut_all(salt, model)

    def clear_with_a_cursor(self, salt: str | None, model: str | None, limit: int) -> None:
        cursor = self.manager.clear_in_slices(salt, model=model)
        before = 0
        while cursor.advance(limit):
            self.manager.check()
            assert cursor.removed.chunks <= before + limit
            before = cursor.removed.chunks
        assert cursor.removed.chunks == len(self._chosen(salt, model))
        self._cut_all(salt, model)

    def drop(self, salt: str, prompt: Tokens) -> None:
        key = (salt, prompt)
        self.manager.drop([digest(key)])
        node = self.model.at(key, "visible") or self.model.partial.get(key)
        if node is not None:
            self.model.cut(node)

    @rule(salt=salts, prompt=prompts, start=st.integers(0, 2))
    def touch(self, salt: str, prompt: Tokens, start: int) -> None:
        keys = [key for key in parts(salt, prompt) if len(key[1]) % CHUNK == 0][start:]
        known: list[Node] = []
        for key in keys:
            node = self.model.at(key, "visible")
            if node is None:
                break
            known.append(node)
        assert self.manager.touch([digest(key) for key in keys]) == len(known)
        if known:
            before = [
                self.model.at((salt, prompt[: at * CHUNK]), "visible") for at in range(1, known[0].depth + 1)
            ]
            self.model.touch([node for node in before if node] + known)

    @invariant()
    def all_agree(self) -> None:
        self.manager.check()
        stats = self.manager.stats()
        model = self.model
        assert stats.capacity == model.usable
        assert stats.free == model.free()
        assert stats.resident == model.count("visible")
        assert stats.retiring == model.count("retiring")
        assert stats.reserved == model.count("reserved", "written")
        assert stats.quarantined == model.count("quarantined")
        assert stats.leased == sum(node.leases > 0 for node in model.nodes)
        assert stats.pins == len(model.pins)
        assert stats.pinned == model.pinned()
        assert stats.leases == len(self.readers)
        assert stats.reservations == len(self.writers)
        parts_of_all = stats.free + stats.resident + stats.retiring + stats.reserved + stats.quarantined
        assert parts_of_all == stats.capacity
        slots = [node.slot for node in model.nodes]
        assert len(set(slots)) == len(slots)

    def teardown(self) -> None:
        """Once everybody is gone, nothing is held any more."""
        self.workers_die()
        for owner in ("a", "b"):
            self.owner_ends(owner, keep=False)
        stats = self.manager.stats()
        assert (stats.leased, stats.leases, stats.reservations) == (0, 0, 0)
        assert (stats.retiring, stats.reserved, stats.quarantined) == (0, 0, 0)
        self.listen(3)
        self.manager.clear()
        stats = self.manager.stats()
        assert (stats.free, stats.pinned) == (self.model.usable, 0)
        self.model.nodes.clear()
        self.listen(3)
        assert not self.index


class QuotaMachine(ManagerMachine):
    """The same over a policy that keeps owners apart."""

    quotas: Mapping[str, int | None] = {"tenant": 2, "*": 6}

    @rule(
        owner=st.sampled_from(["", "tenant", "stranger", "*"]),
        slots=st.sampled_from([0, 1, 3, 5, None]),
        forget=st.booleans(),
        enforce=st.sampled_from(["no", "one", "all"]),
    )
    def change_quota(self, owner: str, slots: int | None, forget: bool, enforce: str) -> None:
        assert self.model.quotas is not None
        quota = None if slots is None else slots * SLOT_BYTES + SLOT_BYTES - 1
        if owner == "*":
            self.manager.set_default_quota(quota)
            self.model.quotas["*"] = slots
        elif forget:
            assert self.manager.forget_quota(owner) == (owner in self.model.quotas)
            self.model.quotas.pop(owner, None)
        else:
            self.manager.set_quota(owner, quota)
            self.model.quotas[owner] = slots
        if enforce != "no":
            self.enforce(None if enforce == "all" or owner == "*" else owner)

    def enforce(self, owner: str | None) -> None:
        cursor = self.manager.enforce_quotas(owner)
        while cursor.advance(2):
            self.manager.check()
        evicted = 0
        for salt in ("", "tenant") if owner is None else (owner,):
            allowed = self.model.allowed(salt)
            if allowed is not None:
                evicted += self.model.evict(self.model.held(salt) - allowed, owner=salt)
        assert cursor.evicted == evicted

    @invariant()
    def owners_are_reported(self) -> None:
        assert self.model.quotas is not None
        report = self.manager.quota_report()
        named = [owner for owner in sorted(self.model.quotas) if owner != "*"]
        assert [usage.owner for usage in report.owners] == named
        assert [usage.held_slots for usage in report.owners] == [self.model.held(salt) for salt in named]
        assert report.other_slots == len(self.model.nodes) - sum(map(self.model.held, named))
        refused = sum(usage.over_quota for usage in report.owners) + report.other_over_quota
        assert refused == self.manager.stats().over_quota


SETTINGS = settings(
    max_examples=120,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestManagerMachine = ManagerMachine.TestCase
TestManagerMachine.settings = SETTINGS
TestQuotaMachine = QuotaMachine.TestCase
TestQuotaMachine.settings = settings(SETTINGS, max_examples=60)
