"""The directory's desk: a frame comes in, the frame that answers it goes out."""

from __future__ import annotations

from kvferry.api import KVFerryError
from kvferry_sharing_p2p.directory.answers import Progress, Refusal, Stranger
from kvferry_sharing_p2p.directory.messages import (
    WIRE_VERSION,
    Accepted,
    Answer,
    AskStatus,
    Beat,
    BeginAll,
    Bye,
    Changes,
    Codec,
    EndAll,
    Find,
    Followed,
    FromDirectory,
    Hello,
    Refused,
    Rejected,
    SomeOfAll,
    Status,
    ToDirectory,
    Unknown,
)
from kvferry_sharing_p2p.directory.state import Directory


class Desk:
    """Reads messages for a directory and writes its answers. Threads: one at a time."""

    def __init__(self, directory: Directory) -> None:
        self.directory = directory
        self.rejected = 0
        """Frames that were no messages."""
        self._codec = Codec()

    def answer(self, frame: bytes, now: float, where: str = "a peer") -> bytes | None:
        """The answer to a frame that ``where`` has sent; None if there is none to give. Never raises for
        what is in a frame: such a one is answered with the reason."""
        try:
            message = self._codec.read_to_directory(frame, where)
        except KVFerryError as error:
            self.rejected += 1
            return self._codec.encode(Rejected(version=WIRE_VERSION, reason=error.what))
        answer = self._answer(message, now)
        return None if answer is None else self._codec.encode(answer)

    def status(self, now: float) -> Status:
        """How things stand."""
        return Status(status=self.directory.status(now), rejected=self.rejected)

    def _answer(self, message: ToDirectory, now: float) -> FromDirectory | None:
        directory = self.directory
        match message:
            case Find():
                found = directory.find(message.namespace, message.digests, message.asker, now, message.limit)
                return Answer(id=message.id, found=found)
            case Changes():
                return _followed(
                    directory.change(message.session, message.sequence, message.added, message.removed, now)
                )
            case Beat():
                return _followed(directory.heartbeat(message.session, message.sequence, now))
            case BeginAll():
                return _followed(directory.begin(message.session, message.sequence, now))
            case SomeOfAll():
                return _followed(directory.add(message.session, message.sequence, message.digests, now))
            case EndAll():
                return _followed(directory.end(message.session, message.sequence, now))
            case Hello():
                return self._welcome(message, now)
            case Bye():
                directory.leave(message.session, now)
                return None
            case AskStatus():
                return self.status(now)

    def _welcome(self, hello: Hello, now: float) -> Accepted | Refused:
        answer = self.directory.register(
            hello.instance, hello.epoch, hello.namespace, hello.ranks, hello.address, now
        )
        if isinstance(answer, Refusal):
            return Refused(epoch=hello.epoch, attempt=hello.attempt, refusal=answer)
        return Accepted(epoch=hello.epoch, attempt=hello.attempt, registration=answer)


def _followed(answer: Progress | Stranger) -> Followed | Unknown:
    return Unknown(stranger=answer) if isinstance(answer, Stranger) else Followed(progress=answer)
