"""Several instances that read from each other, a directory between them, and a network that fails."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable
from random import Random

from attrs import define, evolve, field

from kvferry_sharing_p2p.directory.answers import DirectoryOptions
from kvferry_sharing_p2p.directory.desk import Desk
from kvferry_sharing_p2p.directory.state import Directory
from tests.simulation.coverage import Coverage
from tests.simulation.events import EventLoop, require
from tests.simulation.fleet_life import LEASE, LOAD, LONGEST, WRITE_SECONDS, Life
from tests.simulation.fleet_parts import Process, key
from tests.simulation.network import Network, Weather

NAMES = ("ann", "bob", "eve")
TEXTS = "pppqqrrstuvw"
MOST_LIVES = 5
MOST_REQUESTS = 6
AUDIT_EVERY = 20
DIRECTORY = "directory"
OPTIONS = DirectoryOptions(heartbeat_seconds=0.7, limit_seconds=2.5, resync_seconds=2.0)
FINE = Weather(lost=0.0, doubled=0.0, late=0.0, reordered=0.0)
BAD = Weather(lost=0.05, doubled=0.08, late=0.05, reordered=0.25, late_seconds=(0.3, 4.0))


@define(kw_only=True)
class FleetSettings:
    """``names`` of instances, ``slots`` of each rank of each. ``one_sided``: memory of a peer that stands
    still can be read all the same. ``happenings``: whether anything happens that a test does not do."""

    names: tuple[str, ...] = NAMES
    ranks: int = 1
    slots: int = 12
    staging: int | None = None
    """Slots of each rank's staging; ``None`` where peers read the first tier itself."""
    delay: bool = False
    """Whether requests read what they are lent into their blocks, and not into the first tier."""
    read_seconds: float = 0.02
    """How long a chunk takes on the average."""
    one_sided: bool = True
    weather: Weather = field(factory=lambda: evolve(FINE))
    happenings: bool = False

    @classmethod
    def of(cls, seed: int) -> FleetSettings:
        """Each seed has a fleet of its own size."""
        random = Random(seed)
        return cls(
            names=NAMES[: random.choice((2, 3, 3))],
            ranks=random.choice((1, 1, 2)),
            slots=random.choice((10, 16, 24)),
            staging=random.choice((None, None, 3, 6)),
            read_seconds=random.choice((0.02, 0.02, 0.5)),
            one_sided=random.random() < 0.5,
            delay=random.random() < 0.4,
            weather=BAD,
            happenings=True,
        )


class Fleet:
    """Builds all of it and lets events happen. Deterministic: the same seed is the same history."""

    target = "simulate-fleet"

    def __init__(self, seed: int, settings: FleetSettings | None = None) -> None:
        self.settings = settings or FleetSettings.of(seed)
        self.loop = EventLoop(seed)
        self.network = Network(self.loop, self.settings.weather)
        self.coverage = Coverage()
        self.seen: Counter[str] = Counter()
        self.ranks = self.settings.ranks
        self.one_sided = self.settings.one_sided
        self.cut: set[frozenset[str]] = set()
        """Who does not hear whom."""
        self.lost: Callable[[str], bool] = lambda kind: False
        """A test's own choice of messages that get lost."""
        self.lives: list[Life] = []
        self.gone: Counter[str] = Counter()
        """What lives that are over have counted."""
        self._exports: dict[bytes, Life] = {}
        self._sent_until: defaultdict[str, float] = defaultdict(float)
        self._ports = 0
        self.directory_process = Process(self.loop)
        self.desk = self._new_desk()
        for name in self.settings.names:
            self.start(name)
        if self.settings.happenings:
            self._something()

    @property
    def calm(self) -> bool:
        return self.network.calm or not self.settings.happenings

    def saw(self, what: str) -> None:
        """Something happened that has to happen in some run."""
        self.seen[what] += 1

    # Messages

    def post(self, kind: str, arrive: Callable[[], object], *, can_be_lost: bool = True) -> None:
        """Carry a message, if nothing happens to it."""
        if can_be_lost and self.lost(kind):
            self.loop.note(f"lost: {kind}")
            return
        self.network.send(kind, arrive, can_be_lost=can_be_lost)

    def post_in_order(self, way: str, kind: str, arrive: Callable[[], object]) -> None:
        """Carry one that arrives once, behind those before it on its way."""
        at = max(self.loop.now + self.loop.random.expovariate(1000.0), self._sent_until[way])
        self._sent_until[way] = at
        self.loop.after(at - self.loop.now, kind, arrive)

    def reach(self, one: str, other: str) -> bool:
        return frozenset((one, other)) not in self.cut

    def tell_directory(self, life: Life, frame: bytes) -> None:
        def arrive() -> None:
            if self.reach(life.id.instance, DIRECTORY):
                self.directory_process.do("directory", answer)

        def answer() -> None:
            told = self.desk.answer(frame, self.loop.now, str(life))
            if told is not None:
                self.post("from the directory", lambda: heard(told))

        def heard(told: bytes) -> None:
            if self.reach(life.id.instance, DIRECTORY):
                life.process.do("heard the directory", lambda: life.carrier.hear_directory(told))

        self.post("to the directory", arrive)

    def export(self, life: Life, rank: int) -> bytes:
        """What a rank's channel tells peers of itself."""
        made = json.dumps([life.id.epoch.hex(), rank]).encode()
        self._exports[made] = life
        return made

    def life_of(self, export: bytes) -> Life:
        return self._exports[export]

    def at(self, address: bytes) -> Life | None:
        """Whoever listens there now."""
        return next((life for life in self.lives if life.address == address and life.process.alive), None)

    # Lives

    def start(self, name: str, address: bytes | None = None) -> Life:
        """An instance starts, at an address of its own or the one of somebody before it."""
        self._ports += 1
        life = Life(self, name, address or f"{name}:{self._ports}".encode(), self.settings.slots)
        self.lives.append(life)
        life.start()
        return life

    def life(self, name: str) -> Life:
        """The last one of a name."""
        return [each for each in self.lives if each.id.instance == name][-1]

    def kill(self, life: Life, *, noticed: bool = True) -> None:
        """At once. Connections to it break, which is ``noticed`` or is not."""
        self.loop.note(f"killed {life}")
        life.kill()
        self.lives.remove(life)
        self.gone += life.borrowing.counts + _prefixed(life)
        for other in self.lives if noticed else ():
            for known in list(other.carrier.acquaintances.values()):
                if known.peer == life.id:
                    other.process.after(
                        self.loop.random.expovariate(100.0),
                        "connection broke",
                        lambda other=other, known=known: other.carrier.part(known, "the connection broke"),
                    )

    def restart(self, life: Life, *, same_address: bool) -> Life:
        self.kill(life)
        return self.start(life.id.instance, life.address if same_address else None)

    def stop(self, life: Life, seconds: float, *, workers: bool) -> None:
        """It stands still for a while: its scheduler alone, or its workers, too."""
        stopped = [life.process, *(worker.process for worker in life.workers if workers)]
        if any(each.stands for each in stopped):
            return
        self.loop.note(f"stopped {life} for {seconds:.1f} s")
        for each in stopped:
            each.stop()
        self.loop.after(seconds, f"{life} goes on", lambda: [each.go_on() for each in stopped])

    def restart_directory(self) -> None:
        """It is killed, and has forgotten everything when it comes back."""
        self.loop.note("directory killed")
        self.directory_process.kill()
        self.directory_process = Process(self.loop)
        self.desk = self._new_desk()

    def kill_directory(self) -> None:
        self.directory_process.kill()

    def _new_desk(self) -> Desk:
        return Desk(Directory(OPTIONS, self.loop.random.randbytes(16), self.loop.now))

    # What happens

    def _something(self) -> None:
        if self.network.calm:
            return
        self.loop.after(self.loop.random.expovariate(1 / 0.05), "something", self._something)
        if not self.lives:
            self.start(self.loop.random.choice(self.settings.names))
            return
        random, life = self.loop.random, self.loop.random.choice(self.lives)
        text, length, tail = random.choice(TEXTS), random.randint(1, 5), random.random() < 0.3
        wanted = self._wanted(life)
        acts: dict[str, tuple[float, Callable[[], object]]] = {
            "ask": (20, lambda: self._ask(life, wanted or text, length, tail)),
            "compute": (8, lambda: life.compute(text, length, tail=tail)),
            "abort": (1.5, lambda: self._abort(life)),
            "clear": (0.5, lambda: life.forget_all(new_weights=False)),
            "!drop": (0.3, lambda: life.drop(text)),
            "!stop": (0.3, lambda: self._stop(life)),
            "!kill": (0.12, lambda: self._kill(life)),
            "!leave": (0.05, lambda: self._leave(life)),
            "!new weights": (0.05, lambda: self._new_weights(life)),
            "!twin": (0.04, lambda: self._twin(life)),
            "!directory": (0.07, self._directory_fails),
            "!cut": (0.12, self._cut),
            "!break": (0.15, lambda: self._break(life)),
        }
        names = list(acts)
        (chosen,) = random.choices(names, [acts[name][0] for name in names])
        if life.process.stands and chosen in ("ask", "compute", "abort", "clear", "!drop", "!new weights"):
            return
        if chosen == "ask" and not wanted and self.loop.chance(0.7):
            chosen = "compute"  # or nobody would have anything
        if chosen.startswith("!"):
            self.loop.fault(chosen[1:])
        self.loop.note(f"{chosen} {life} {wanted or text}{length}")
        acts[chosen][1]()

    def _wanted(self, life: Life) -> str:
        """A text that another one has the beginning of, and this one has not, mostly."""
        here = life.visible()
        there = set().union(*(each.visible() for each in self.lives if each is not life))
        texts = [each for each in sorted(set(TEXTS)) if key(each, 0) in there and key(each, 0) not in here]
        return self.loop.random.choice(texts) if texts and self.loop.chance(0.9) else ""

    def _ask(self, life: Life, text: str, length: int, tail: bool) -> None:
        for _ in range(self.loop.random.choice((1, 1, 1, 3))):
            if len(life.requests) < MOST_REQUESTS:
                life.ask(text, length, tail=tail)

    def _abort(self, life: Life) -> None:
        if life.requests:
            self.saw("request: aborted")
            life.leave(self.loop.random.choice(list(life.requests.values())))

    def _stop(self, life: Life) -> None:
        random = self.loop.random
        self.saw("stopped")
        self.stop(life, random.choice((0.2, 1.0, LEASE, 9.0)), workers=random.random() < 0.7)

    def _kill(self, life: Life) -> None:
        random, address = self.loop.random, life.address
        self.kill(life, noticed=random.random() < 0.7)
        same = address if random.random() < 0.5 else None
        pause = random.choice((0.01, 0.5, 4.0))

        def again() -> None:
            if self.calm and any(each.id.instance == life.id.instance for each in self.lives):
                return
            taken = same is not None and self.at(same) is not None
            self.start(life.id.instance, None if taken else same)

        self.loop.after(pause, "starts anew", again)

    def _leave(self, life: Life) -> None:
        """In good order."""
        life.sharing.close()
        self._kill(life)

    def _new_weights(self, life: Life) -> None:
        """It shares nothing any more, until it starts anew."""
        life.forget_all(new_weights=True)
        self.loop.after(
            self.loop.random.uniform(0.5, 5.0), "ends", lambda: life in self.lives and self._kill(life)
        )

    def _twin(self, life: Life) -> None:
        """A second instance of the same name; one of the two is told to leave some time."""
        if len(self.lives) >= MOST_LIVES:
            return
        self.saw("twin")
        twin = self.start(life.id.instance)

        def ends() -> None:
            alive = [each for each in (life, twin) if each in self.lives]
            if len(alive) == 2:
                self.kill(self.loop.random.choice(alive))

        self.loop.after(self.loop.random.uniform(0.5, 8.0), "twin ends", ends)

    def _directory_fails(self) -> None:
        random = self.loop.random
        if random.random() < 0.5:
            self.restart_directory()
            return
        process = self.directory_process
        process.stop()
        self.loop.after(random.choice((0.5, 2.0, 5.0)), "directory goes on", process.go_on)

    def _cut(self) -> None:
        names = [DIRECTORY, *self.settings.names]
        pair = frozenset(self.loop.random.sample(names, 2))
        self.cut.add(pair)
        self.loop.after(self.loop.random.choice((0.3, 2.0, 7.0)), "healed", lambda: self.cut.discard(pair))

    def _break(self, life: Life) -> None:
        for known in list(life.carrier.acquaintances.values()):
            life.process.do("connection broke", lambda known=known: life.carrier.part(known, "it broke"))

    # Running

    def step(self) -> None:
        self.loop.step()
        for life in self.lives:
            life.look()
        if self.loop.count % AUDIT_EVERY == 0:
            for life in self.lives:
                life.audit()

    def run(self, events: int) -> None:
        """Let so many events happen. Raises :class:`SimulationFailure` at the first that must not."""
        end = self.loop.count + events
        while self.loop.count < end:
            self.step()

    def run_for(self, seconds: float) -> None:
        end = self.loop.now + seconds
        while self.loop.now < end:
            self.step()

    def run_until(self, condition: Callable[[], object], seconds: float, what: str) -> None:
        """Until something is so; a failure called ``what`` if that takes longer."""
        end = self.loop.now + seconds
        while not condition():
            require(self.loop.now < end, what, "\n".join(life.left() for life in self.lives))
            self.step()

    def drain(self) -> None:
        """Nothing fails any more and nobody asks: all must end, all counts return, and the directory knows
        what there is."""
        self.network.calm = True
        self.cut.clear()
        self.lost = lambda kind: False
        for name in self.settings.names:
            for twin in [each for each in self.lives if each.id.instance == name][:-1]:
                self.kill(twin)
        for life in self.lives:
            for request in list(life.requests.values()):
                life.process.do("leaves", lambda life=life, request=request: life.leave(request))
        longest = LONGEST + LOAD + WRITE_SECONDS + 20.0
        for check, holds in self._at_the_end().items():
            self.run_until(holds, longest, check)
        # What came late to who stood still may have begun something anew.
        ends = self._at_the_end().values()
        self.run_until(lambda: all(holds() for holds in ends), longest, "all counts return")
        for life in self.lives:
            life.audit()
            life.manager.clear()
            stats = life.manager.stats()
            require(stats.free == stats.capacity, "all counts return", life.left())

    def _at_the_end(self) -> dict[str, Callable[[], bool]]:
        return {
            "all counts return": lambda: all(life.quiet for life in self.lives),
            "workers know whom to read from": lambda: all(life.peers_met for life in self.lives),
            "the directory knows what there is": self._told,
        }

    def _told(self) -> bool:
        known = {
            each.instance: set(self.desk.directory.keys_of(each.instance))
            for each in self.desk.directory.status(self.loop.now).instances
        }
        there = {}
        for life in self.lives:
            if life.carrier.publisher is not None:
                residency = life.manager._residency
                there[life.id.instance] = {
                    digest
                    for digest in life.visible()
                    if residency.entries.is_full(residency.entries.find(digest))
                }
        return known == there

    def counts(self) -> Counter[str]:
        """What was borrowed and lent in all lives."""
        total = Counter(self.gone)
        for life in self.lives:
            total += life.borrowing.counts + _prefixed(life)
        return total


def _prefixed(life: Life) -> Counter[str]:
    return Counter({f"lent: {name}": count for name, count in life.sharing.serving.counts.items()})
