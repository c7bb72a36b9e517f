"""What an instance has told the directory, or has yet to, and what of it is not known to have arrived."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterable, Iterator

from attrs import define

from kvferry.api import DIGEST_BYTES
from kvferry_sharing_p2p.directory.messages import BeginAll, Changes, EndAll, SomeOfAll

Numbered = BeginAll | SomeOfAll | EndAll | Changes


class Gathered:
    """Changes that were not sent yet. Of one key the last change counts, wherever the ones before it are."""

    def __init__(self) -> None:
        self._changes: dict[bytes, bool] = {}
        """Whether the key is there now."""
        self._since = 0.0

    def __len__(self) -> int:
        return len(self._changes)

    def note(self, digests: Iterable[bytes], there: bool, now: float) -> None:
        if not self._changes:
            self._since = now
        self._changes.update(dict.fromkeys(digests, there))

    def due(self, keys: int, seconds: float) -> float:
        """When a batch has to go: at once if there are ``keys``; infinity if there is nothing."""
        if not self._changes:
            return math.inf
        return self._since if len(self._changes) >= keys else self._since + seconds

    def take(self, keys: int) -> tuple[bytes, bytes]:
        """Up to so many that were added, and removed: those that have waited longest."""
        changes = list(itertools.islice(self._changes.items(), keys))
        for digest, _ in changes:
            del self._changes[digest]
        added = b"".join(digest for digest, there in changes if there)
        removed = b"".join(digest for digest, there in changes if not there)
        return added, removed

    def clear(self) -> None:
        self._changes.clear()


@define
class _Sent:
    message: Numbered
    at: float


class Unacknowledged:
    """Messages that were sent and may be needed once more, in their order and without gaps."""

    def __init__(self) -> None:
        self._sent: deque[_Sent] = deque()
        self.changes = 0
        """Keys in the changes among them."""
        self.parts = 0
        """How many of them are parts of everything."""

    def __len__(self) -> int:
        return len(self._sent)

    def __iter__(self) -> Iterator[Numbered]:
        return (sent.message for sent in self._sent)

    def append(self, message: Numbered, now: float) -> None:
        self._sent.append(_Sent(message, now))
        self._count(message, 1)

    def acknowledge(self, sequence: int) -> None:
        """Forget what took effect: everything up to ``sequence``."""
        while self._sent and self._sent[0].message.sequence <= sequence:
            self._count(self._sent.popleft().message, -1)

    def overdue(self, now: float, seconds: float) -> Numbered | None:
        """The oldest one if it was last sent so long ago, to be sent again now."""
        if not self._sent or now - self._sent[0].at < seconds:
            return None
        self._sent[0].at = now
        return self._sent[0].message

    def due(self, seconds: float) -> float:
        """When :meth:`overdue` will have one."""
        return self._sent[0].at + seconds if self._sent else math.inf

    def again(self, now: float) -> list[Numbered]:
        """All of them, to be sent again now."""
        for sent in self._sent:
            sent.at = now
        return list(self)

    def begins_anew(self) -> bool:
        """Whether everything is told among them from the beginning."""
        return any(isinstance(message, BeginAll) for message in self)

    def clear(self) -> None:
        self._sent.clear()
        self.changes = self.parts = 0

    def _count(self, message: Numbered, sign: int) -> None:
        if isinstance(message, Changes):
            self.changes += sign * ((len(message.added) + len(message.removed)) // DIGEST_BYTES)
        elif isinstance(message, SomeOfAll):
            self.parts += sign
