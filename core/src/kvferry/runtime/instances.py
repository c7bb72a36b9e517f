"""The instances that run on this host, and how to ask one of them something."""

from __future__ import annotations

import os
import secrets
import time
from pathlib import Path
from typing import TypeVar

import msgspec
from attrs import frozen

from kvferry import __version__
from kvferry.api import ErrorKind, KVFerryError, Retry
from kvferry.config import Config
from kvferry.data.questions import QUESTIONS_VERSION, Answer, Question
from kvferry.data.wire import MAXIMUM_MESSAGE_BYTES, Ask, Told
from kvferry.runtime.address import MeetingPlace, meeting_places

ANSWER_SECONDS = 5.0
"""How long an instance may be silent before it is called hung: far beyond a stall of the interpreter."""
_ID_LETTERS = 8

A = TypeVar("A", bound=Answer)


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """What an instance says about itself in its meeting folder. ``questions`` is the version that it
    answers; fields may be added and are never taken away."""

    name: str
    engine_id: str
    pid: int
    version: str
    questions: int
    tiers: tuple[str, ...]


def instance_card(config: Config, engine_id: str) -> str:
    """The card of this process."""
    card = Card(
        name=config.instance or engine_id,
        engine_id=engine_id,
        pid=os.getpid(),
        version=__version__,
        questions=QUESTIONS_VERSION,
        tiers=tuple(config.tiers),
    )
    return msgspec.json.encode(card).decode()


@frozen(kw_only=True)
class Instance:
    """A meeting folder. ``card`` is ``None`` when it cannot be read; ``alive`` says whether a process
    holds the folder: what a killed engine left behind is there and dead."""

    place: MeetingPlace
    card: Card | None
    alive: bool

    @property
    def id(self) -> str:
        """Unique on this host and short."""
        return self.place.folder.name[:_ID_LETTERS]

    @property
    def name(self) -> str:
        return self.card.name if self.card is not None else "?"

    @property
    def speaks_our_version(self) -> bool:
        return self.card is not None and self.card.questions == QUESTIONS_VERSION


def find_instances(root: Path) -> list[Instance]:
    """Every instance of this user below ``root``, dead ones included."""
    return [
        Instance(place=place, card=_card(place), alive=place.alive())
        for place in meeting_places(root)
        if (place.folder / "lock").exists()
    ]


def choose_instance(root: Path, wanted: str | None) -> Instance:
    """The living instance of this name or id, or the only one.

    Raises :class:`KVFerryError` that lists what there is.
    """
    found = find_instances(root)
    living = [each for each in found if each.alive]
    chosen = living if wanted is None else [each for each in living if wanted in (each.name, each.id)]
    if len(chosen) == 1:
        return chosen[0]
    there = ", ".join(f"{each.name} ({each.id})" for each in living) or "none"
    if wanted is not None and not chosen and any(wanted in (each.name, each.id) for each in found):
        what = f"instance {wanted!r} is dead; its folder is removed when the next engine starts"
    elif wanted is None:
        what = "several instances are running here" if living else "no instance is running here"
    elif chosen:
        what = f"several running instances are called {wanted!r}"
    else:
        what = f"no running instance is called {wanted!r}"
    raise KVFerryError(
        what,
        kind=ErrorKind.CONFIG,
        where=str(root),
        why=f"running instances, with their ids: {there}",
        remedy="name one of them by its id"
        if living
        else "look in another folder with --runtime-dir, and as the user that runs the engine",
        retry=Retry.AFTER_CHANGE,
    )


def ask(instance: Instance, question: Question, expected: type[A], seconds: float = ANSWER_SECONDS) -> A:
    """One question and its answer. Waits for ``seconds`` at the most.

    Raises :class:`KVFerryError`: ``TIMEOUT`` when the instance does not answer, ``PROTOCOL`` when it
    speaks another version, ``UNSUPPORTED`` with the instance's own words when it refuses.
    """
    where = f"instance {instance.name} ({instance.id})"
    if not instance.speaks_our_version:
        theirs = "cannot be read" if instance.card is None else f"is of kvferry {instance.card.version}"
        raise KVFerryError(
            "the instance answers another version's questions",
            kind=ErrorKind.PROTOCOL,
            where=where,
            why=f"its card {theirs}; this is kvferry {__version__}, questions of version {QUESTIONS_VERSION}",
            remedy="use the kvferry command of the environment in which the engine runs",
            retry=Retry.AFTER_CHANGE,
        )
    token = instance.place.read_token()
    if token is None:
        raise _silent(where, "its secret cannot be read")
    message = Ask(QUESTIONS_VERSION, token, msgspec.Raw(msgspec.msgpack.encode(question)))
    frame = _exchange(instance.place.endpoint, msgspec.msgpack.encode(message), seconds)
    if frame is None:
        raise _silent(where, f"it did not answer in {seconds:g} s")
    try:
        told = msgspec.msgpack.decode(frame, type=Told)
        if not told.refused and told.version == QUESTIONS_VERSION:
            return msgspec.msgpack.decode(told.answer, type=expected)
    except msgspec.DecodeError as error:
        raise KVFerryError(
            "the answer cannot be read",
            kind=ErrorKind.PROTOCOL,
            where=where,
            why=str(error),
            remedy="use the kvferry command of the environment in which the engine runs",
        ) from error
    raise KVFerryError(
        told.refused or f"it answered in version {told.version}",
        kind=ErrorKind.UNSUPPORTED,
        where=where,
        retry=Retry.AFTER_CHANGE,
    )


def _exchange(endpoint: str, frame: bytes, seconds: float) -> bytes | None:
    """Send one message and wait for one answer."""
    import zmq

    deadline = time.monotonic() + seconds
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MAXIMUM_MESSAGE_BYTES)
        socket.setsockopt(zmq.IDENTITY, b"operator-" + secrets.token_bytes(8))
        socket.connect(endpoint)
        socket.send(frame)
        left = int((deadline - time.monotonic()) * 1000)
        return socket.recv() if socket.poll(max(0, left)) else None


def _silent(where: str, why: str) -> KVFerryError:
    return KVFerryError(
        "the instance does not answer",
        kind=ErrorKind.TIMEOUT,
        where=where,
        why=why,
        remedy="look at the engine's log; its service thread is busy or hung",
        retry=Retry.LATER,
    )


def _card(place: MeetingPlace) -> Card | None:
    text = place.read_card()
    try:
        return None if text is None else msgspec.json.decode(text, type=Card)
    except msgspec.DecodeError:
        return None
