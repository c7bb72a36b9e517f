"""An instance's answers to its operator, worked out beside everything else that the service does."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence

import msgspec
from attrs import asdict, frozen

from kvferry.api import ErrorKind, KVFerryError
from kvferry.control.lower import Health, LowerTierReport
from kvferry.control.manager import CacheManager
from kvferry.control.outcomes import Stats
from kvferry.data.questions import (
    QUESTIONS_VERSION,
    Answer,
    AskClear,
    AskPins,
    AskQuotas,
    AskStatus,
    Cleared,
    ExtendPin,
    ForgetQuota,
    LowerStatus,
    Owner,
    PeerStatus,
    Pins,
    PinState,
    Question,
    Quotas,
    ReleasePin,
    SetQuota,
    SharingStatus,
    Status,
    TierCleared,
)
from kvferry.data.wire import Told
from kvferry.runtime.fair_lock import FairLock
from kvferry.runtime.lower_tiers import LowerTiers
from kvferry.runtime.sharing_statistics import SharingStatistics
from kvferry.runtime.waits import LowerStatistics

logger = logging.getLogger(__name__)

MAXIMUM_QUESTIONS = 16
"""Questions in work at one time."""
TURN_SECONDS = 0.002
"""How long one turn lasts, after which workers' results and timers have theirs."""

Job = Generator[None, None, Answer]
"""Gives way between two holds of the lock, and returns the answer."""


@frozen(kw_only=True)
class TierCard:
    """What a tier is called, and the bytes of a slot on one rank."""

    name: str = "memory"
    slot_bytes: int = 0


class AdminDesk:
    """Answers questions about the tiers of one engine. On the service thread.

    ``manager`` is the first tier's, ``lower`` are those below it, if there are any. The lock is held for
    one slice at a time. ``statistics`` gives the runtime's numbers and the manager's, and whether all workers
    are there, ``lower_statistics`` what is known of the tiers below, ``sharing_statistics`` what of other
    instances; ``on_change`` is called, under the lock, after something went that a request may have matched.
    """

    def __init__(
        self,
        manager: CacheManager,
        lock: FairLock,
        tier: TierCard,
        *,
        statistics: Callable[[], tuple[dict[str, int], Stats, bool]],
        on_change: Callable[[], None],
        clock: Callable[[], float],
        lower: LowerTiers | None = None,
        lower_statistics: Callable[[], LowerStatistics | None] = lambda: None,
        sharing_statistics: Callable[[], SharingStatistics | None] = lambda: None,
    ) -> None:
        self._manager = manager
        self._lock = lock
        self._tier = tier
        self._statistics = statistics
        self._on_change = on_change
        self._clock = clock
        self._lower = lower
        self._lower_statistics = lower_statistics
        self._sharing_statistics = sharing_statistics
        self._jobs: deque[tuple[bytes, Job]] = deque()
        self._decoder = msgspec.msgpack.Decoder(Question)

    @property
    def busy(self) -> bool:
        """Whether some question is in work."""
        return bool(self._jobs)

    def ask(self, peer: bytes, question: bytes) -> Told | None:
        """Take a question of this version; why it is refused, or None: then :meth:`work` answers it."""
        if len(self._jobs) >= MAXIMUM_QUESTIONS:
            return _refused(f"{MAXIMUM_QUESTIONS} questions are in work already; try again later")
        try:
            decoded = self._decoder.decode(question)
        except msgspec.DecodeError as error:
            return _refused(f"the question cannot be read: {error}")
        self._jobs.append((peer, self._job(decoded)))
        return None

    def work(self) -> tuple[bytes, Told] | None:
        """Go on with the questions in turn for about :data:`TURN_SECONDS`; an answer once one is ready."""
        end = time.perf_counter() + TURN_SECONDS
        while self._jobs:
            peer, job = self._jobs.popleft()
            told = self._step(job)
            if told is not None:
                return peer, told
            self._jobs.append((peer, job))
            if time.perf_counter() > end:
                break
        return None

    def _step(self, job: Job) -> Told | None:
        try:
            next(job)
        except StopIteration as end:
            return Told(QUESTIONS_VERSION, answer=msgspec.Raw(msgspec.msgpack.encode(end.value)))
        except KVFerryError as error:
            return _refused(str(error))
        except Exception:
            logger.exception("kvferry: an operator's question failed")
            return _refused("the question failed; the engine's log says why")
        return None

    def _job(self, question: Question) -> Job:
        match question:
            case AskStatus():
                return self._status()
            case AskClear():
                return self._clear(question)
            case AskQuotas():
                return self._quotas(question.tier, 0)
            case SetQuota() | ForgetQuota():
                return self._change_quota(question)
            case AskPins():
                return self._pins(0)
            case ExtendPin() | ReleasePin():
                return self._change_pin(question)

    def _status(self) -> Job:
        yield
        numbers, stats, ready = self._statistics()
        below, sharing = self._lower_statistics(), self._sharing_statistics()
        waiting = {} if below is None else asdict(below, filter=lambda field, _: field.name != "tiers")
        return Status(
            self._tier.name,
            self._tier.slot_bytes,
            ready,
            {**numbers, **asdict(stats)},
            () if below is None else tuple(_status_of(report) for report in below.tiers),
            waiting,
            None if sharing is None else _shared(sharing),
        )

    def _clear(self, question: AskClear) -> Job:
        only = question.tier
        with self._lock:
            self._tier_of(only)
        lower = None if only == self._tier.name else self._lower
        tiers = [] if lower is None else lower.clear_begins(question.salt, question.model, only)
        if only in (None, self._tier.name):
            # From below first: what is cleared above must not come up again.
            tiers.append((self._tier.name, self._manager))
        parts = []
        try:
            for name, manager in tiers:
                parts.append((yield from self._clear_one(name, manager, question)))
        finally:
            if lower is not None:
                lower.clear_ended(only)
        return _cleared(parts[::-1])

    def _clear_one(
        self, name: str, manager: CacheManager, question: AskClear
    ) -> Generator[None, None, TierCleared]:
        with self._lock:
            cursor = manager.clear_in_slices(question.salt, model=question.model)
            # Matches from now on see what is left; earlier ones are made again before their load.
            self._on_change()
        more = True
        while more:
            with self._lock:
                more = cursor.advance()
                self._on_change()
            yield
        gone = cursor.removed
        return TierCleared(name, self._health(name), gone.removed, gone.kept, gone.doomed)

    def _health(self, name: str) -> str:
        if self._lower is None or name == self._tier.name:
            return Health.OPEN.value
        with self._lock:
            return self._lower.hierarchy.tier(name).health.value

    def _tier_of(self, name: str | None) -> tuple[str, CacheManager]:
        """A tier's name, the first one's by default, and its manager as it is now. Under the lock.

        Raises :class:`KVFerryError` if there is no such tier.
        """
        if name in (None, self._tier.name):
            return self._tier.name, self._manager
        assert name is not None
        if self._lower is None or name not in self._lower.names():
            names = (self._tier.name, *(() if self._lower is None else self._lower.names()))
            raise KVFerryError(
                f"there is no tier {name!r}",
                kind=ErrorKind.CONFIG,
                remedy=f"name one of this instance's tiers: {', '.join(names)}",
            )
        return name, self._lower.index(name)

    def _quotas(self, tier: str | None, evicted: int) -> Job:
        yield
        with self._lock:
            name, manager = self._with_quotas(tier)
            report = manager.quota_report()
        owners = tuple(
            Owner(usage.owner, usage.quota, usage.held_bytes, usage.over_quota) for usage in report.owners
        )
        return Quotas(name, report.default, owners, report.other_bytes, report.other_over_quota, evicted)

    def _change_quota(self, question: SetQuota | ForgetQuota) -> Job:
        yield
        owner = question.owner
        with self._lock:
            _, manager = self._with_quotas(question.tier)
            if isinstance(question, ForgetQuota):
                if not manager.forget_quota(question.owner):
                    raise KVFerryError(
                        f"owner {question.owner!r} has no quota of its own",
                        kind=ErrorKind.CONFIG,
                        remedy="see 'kvferry live quota list' for those that have",
                    )
            elif question.owner is None:
                manager.set_default_quota(question.quota)
            else:
                manager.set_quota(question.owner, question.quota)
            # A tier that fails meanwhile takes its quotas along, and enforces them when it is opened.
            cursor = manager.enforce_quotas(owner)
        more = True
        while more:
            with self._lock:
                more = cursor.advance()
                self._on_change()
            yield
        return (yield from self._quotas(question.tier, cursor.evicted))

    def _with_quotas(self, tier: str | None) -> tuple[str, CacheManager]:
        name, manager = self._tier_of(tier)
        if not manager.has_quotas:
            raise KVFerryError(
                f"tier {name!r} keeps no quotas",
                kind=ErrorKind.CONFIG,
                why="its eviction policy does not keep owners apart",
                remedy="choose a policy with quotas under the tier's eviction: key, and restart",
            )
        return name, manager

    def _pins(self, changed: int) -> Job:
        yield
        now = self._clock()
        with self._lock:
            pins = self._manager.pins()
        states = tuple(PinState(pin.name, pin.salt, pin.end - now, pin.chunks) for pin in pins)
        return Pins(states, changed)

    def _change_pin(self, question: ExtendPin | ReleasePin) -> Job:
        yield
        now = self._clock()
        with self._lock:
            if isinstance(question, ExtendPin):
                changed = self._manager.extend_pin(question.name, question.seconds, now, question.salt)
            else:
                changed = self._manager.unpin(question.name, question.salt)
        if not changed:
            raise KVFerryError(
                f"there is no pin {question.name!r}"
                + ("" if question.salt is None else f" of salt {question.salt!r}"),
                kind=ErrorKind.CONFIG,
                remedy="see 'kvferry live pins list' for those that there are",
            )
        return (yield from self._pins(changed))


def _cleared(parts: Sequence[TierCleared]) -> Cleared:
    return Cleared(
        sum(part.removed for part in parts),
        sum(part.kept for part in parts),
        sum(part.doomed for part in parts),
        tuple(parts),
    )


def _status_of(report: LowerTierReport) -> LowerStatus:
    numbers = asdict(report, filter=lambda field, _: field.name not in ("name", "health", "reason"))
    return LowerStatus(report.name, report.health, report.reason, numbers)


def _shared(statistics: SharingStatistics) -> SharingStatus:
    return SharingStatus(
        statistics.id.instance,
        statistics.id.epoch.hex(),
        statistics.channel,
        statistics.state.value,
        statistics.reason,
        tuple(
            PeerStatus(peer.id.instance, peer.id.epoch.hex(), peer.standing, peer.reason)
            for peer in statistics.peers
        ),
        {"tokens": statistics.borrowed_tokens, "loans": statistics.loans, **statistics.borrowed},
        {"leases": statistics.leases, "slots": statistics.slots, **statistics.lent},
    )


def _refused(why: str) -> Told:
    return Told(QUESTIONS_VERSION, why)
