"""Publishers, a directory and a network between them that loses, doubles, delays and swaps; from a seed."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import Counter
from collections.abc import Sequence

from attrs import define, field, frozen

from kvferry_sharing_p2p.directory.answers import DirectoryOptions, Found
from kvferry_sharing_p2p.directory.desk import Desk
from kvferry_sharing_p2p.directory.messages import Codec
from kvferry_sharing_p2p.directory.publisher import Identity, Publisher, PublisherOptions
from kvferry_sharing_p2p.directory.state import Directory

NAMESPACES = (b"\x01" * 32, b"\x02" * 32)
CHAINS = [[bytes([chain, depth]) * 16 for depth in range(12)] for chain in range(4)]
DIGESTS = [digest for chain in CHAINS for digest in chain]
DIRECTORY = "directory"


@frozen(kw_only=True)
class Weather:
    """What the network does to a frame."""

    lost: float = 0.0
    doubled: float = 0.0
    seconds: float = 0.01
    """The longest that one takes; frames overtake each other within it."""


CALM = Weather()


@define(eq=False)
class Manager:
    """What an instance can serve, in rows as a manager keeps it. Its log is read later than it is written."""

    rows: list[bytes | None] = field(factory=list)
    log: list[tuple[bytes, bool]] = field(factory=list)

    def served(self) -> set[bytes]:
        return {digest for digest in self.rows if digest is not None}

    def store(self, digest: bytes, chance: random.Random) -> None:
        if digest in self.served():
            return
        free = [row for row, present in enumerate(self.rows) if present is None]
        if free and chance.random() < 0.7:
            self.rows[chance.choice(free)] = digest
        else:
            self.rows.append(digest)
        self.log.append((digest, True))

    def evict(self, digest: bytes) -> None:
        if digest in self.served():
            self.rows[self.rows.index(digest)] = None
            self.log.append((digest, False))

    def walk(self, cursor: int, limit: int) -> tuple[bytes, int | None]:
        end = cursor + limit
        piece = b"".join(digest for digest in self.rows[cursor:end] if digest is not None)
        return piece, end if end < len(self.rows) else None


@define(eq=False)
class Process:
    """One life of an instance."""

    identity: Identity
    manager: Manager
    publisher: Publisher
    ever: set[bytes] = field(factory=set)
    """Everything that it could ever serve."""
    cut: bool = False


class World:
    """Times are seconds since the beginning. Every source of chance is ``seed``."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.now = 0.0
        self.weather = CALM
        self.options = DirectoryOptions(heartbeat_seconds=1.0, limit_seconds=4.0, resync_seconds=3.0)
        self.publishing = PublisherOptions(
            batch_keys=4,
            batch_seconds=0.05,
            backlog_keys=24,
            part_keys=5,
            parts_under_way=2,
            resend_seconds=0.5,
            hello_seconds=0.5,
        )
        self.processes: dict[bytes, Process] = {}
        """Those that live, by epoch."""
        self.lives: dict[bytes, Process] = {}
        """All that ever were."""
        self.seen: Counter[str] = Counter()
        """What happened to directories and publishers that are gone."""
        self._codec = Codec()
        self._frames: list[tuple[float, int, str | bytes, bytes | None, bytes]] = []
        """When it arrives, a number, where, from whom, and what."""
        self._numbers = itertools.count()
        self.desk = self._new_desk()

    @property
    def directory(self) -> Directory:
        return self.desk.directory

    def start(self, instance: str, namespace: bytes = NAMESPACES[0]) -> Process:
        epoch = self.chance.randbytes(16)
        identity = Identity(
            instance=instance, epoch=epoch, namespace=namespace, ranks=2, address=instance.encode() + epoch
        )
        manager = Manager()
        process = Process(identity, manager, Publisher(identity, manager, self.publishing))
        self.processes[epoch] = self.lives[epoch] = process
        return process

    def kill(self, process: Process) -> None:
        del self.processes[process.identity.epoch]
        self.seen["overflows"] += process.publisher.status(self.now).overflows

    def leave(self, process: Process) -> None:
        for message in process.publisher.leave():
            self._send(DIRECTORY, process.identity.epoch, self._codec.encode(message))
        self.kill(process)

    def restart_directory(self) -> None:
        self.note_totals()
        self.desk = self._new_desk()

    def note_totals(self) -> None:
        totals = self.directory.status(self.now).totals
        for name in ("gaps", "duplicates", "expired_keys", "resyncs", "abandoned_resyncs", "refused", "hits"):
            self.seen[name] += getattr(totals, name)

    def change(self, process: Process, stored: Sequence[bytes], evicted: Sequence[bytes] = ()) -> None:
        """The manager's doing; the publisher hears of it when its log is read."""
        for digest in stored:
            process.manager.store(digest, self.chance)
            process.ever.add(digest)
        for digest in evicted:
            process.manager.evict(digest)

    def read_log(self, process: Process, limit: int | None = None) -> None:
        taken = process.manager.log[:limit]
        del process.manager.log[:limit]
        for digest, there in taken:
            (process.publisher.added if there else process.publisher.removed)([digest], self.now)

    def run(self, seconds: float, step: float = 0.05) -> None:
        """Time passes, and everybody does what is due. Logs are read, the last of them in full."""
        end = self.now + seconds
        while self.now < end:
            self.advance(step)
            for process in self.processes.values():
                self.read_log(process)

    def advance(self, seconds: float) -> None:
        self.now += seconds
        for process in self.processes.values():
            if process.publisher.due() <= self.now:
                self._poll(process)
        while self._frames and self._frames[0][0] <= self.now:
            _, _, to, sender, frame = heapq.heappop(self._frames)
            self._deliver(to, sender, frame)

    def find(self, prefix: Sequence[bytes], asker: str, namespace: bytes, limit: int = 1) -> Found:
        return self.directory.find(namespace, b"".join(prefix), asker, self.now, limit)

    def known(self) -> dict[str, set[bytes]]:
        """What the directory says, by instance."""
        status = self.directory.status(self.now)
        return {each.instance: set(self.directory.keys_of(each.instance)) for each in status.instances}

    def _new_desk(self) -> Desk:
        return Desk(Directory(self.options, self.chance.randbytes(16), self.now))

    def _poll(self, process: Process) -> None:
        for message in process.publisher.poll(self.now):
            self._send(DIRECTORY, process.identity.epoch, self._codec.encode(message))

    def _send(self, to: str | bytes, sender: bytes | None, frame: bytes) -> None:
        for _ in range(1 + (self.chance.random() < self.weather.doubled)):
            if self.chance.random() >= self.weather.lost:
                arrives = self.now + self.chance.uniform(0.0, self.weather.seconds)
                heapq.heappush(self._frames, (arrives, next(self._numbers), to, sender, frame))

    def _deliver(self, to: str | bytes, sender: bytes | None, frame: bytes) -> None:
        there = self.processes.get(sender if to == DIRECTORY else to)  # type: ignore[arg-type]
        if there is not None and there.cut:
            return
        if to == DIRECTORY:
            answer = self.desk.answer(frame, self.now)
            if answer is not None and sender is not None:
                self._send(sender, None, answer)
        elif there is not None:
            there.publisher.receive(self._codec.read_from_directory(frame, DIRECTORY), self.now)
            if there.publisher.due() == -math.inf:
                self._poll(there)
