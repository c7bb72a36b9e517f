"""One question to a running directory: how do things stand?"""

from __future__ import annotations

import time
from collections.abc import Callable

from kvferry.api import ErrorKind, KVFerryError, Retry
from kvferry_sharing_p2p.directory.messages import (
    MAXIMUM_FRAME_BYTES,
    WIRE_VERSION,
    AskStatus,
    Codec,
    Rejected,
    Status,
)
from kvferry_sharing_p2p.network.endpoint import Endpoint
from kvferry_sharing_p2p.network.secret import KEY_BYTES, SharedSecret
from kvferry_sharing_p2p.network.sockets import configure


def ask_status(
    endpoint: Endpoint,
    secret: SharedSecret | None,
    seconds: float,
    *,
    random: Callable[[int], bytes],
    clock: Callable[[], float] = time.monotonic,
) -> Status:
    """How the directory at ``endpoint`` stands. Waits for ``seconds`` at the most, but for names that have to
    be resolved.

    Raises :class:`kvferry.api.KVFerryError`: ``TIMEOUT`` when nobody answers, ``COMPATIBILITY`` when somebody
    of another release does, ``PROTOCOL`` when it is no directory, ``IO`` for a name that nobody has.
    """
    import zmq

    deadline = clock() + seconds
    where = endpoint.url
    try:
        target = endpoint.resolved()
    except OSError as error:
        raise KVFerryError(
            f"the name {endpoint.host!r} cannot be resolved",
            kind=ErrorKind.IO,
            where=where,
            why=error.strerror or str(error),
            remedy="correct the name, or write the address as a number",
            retry=Retry.LATER,
        ) from error
    codec = Codec()
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        configure(socket, MAXIMUM_FRAME_BYTES)
        socket.setsockopt(zmq.IPV6, int(target.is_version_6))
        if secret is not None:
            secret.protect_client(socket, random(KEY_BYTES))
        socket.connect(target.url)
        socket.send(codec.encode(AskStatus(version=WIRE_VERSION)))
        if not socket.poll(max(0, int((deadline - clock()) * 1000))):
            raise no_answer(where, seconds)
        answer = codec.read_from_directory(socket.recv(), where)
    if isinstance(answer, Status):
        return answer
    rejected = isinstance(answer, Rejected)
    raise KVFerryError(
        "the controller does not understand the question"
        if rejected
        else "this is no answer to the question",
        kind=ErrorKind.COMPATIBILITY if rejected else ErrorKind.PROTOCOL,
        where=where,
        why=answer.reason if isinstance(answer, Rejected) else f"it answered {type(answer).__name__}",
        remedy="install the same release of kvferry-sharing-p2p everywhere",
        retry=Retry.AFTER_CHANGE,
    )


def no_answer(where: str, seconds: float) -> KVFerryError:
    """Nobody said anything. A wrong secret looks no different: who does not know it is not answered."""
    return KVFerryError(
        "the controller does not answer",
        kind=ErrorKind.TIMEOUT,
        where=where,
        why=f"there was no answer within {seconds:g} s: it does not run there, or its secret is another one",
        remedy="check the address, and that the secret is the one which the controller was started with",
        retry=Retry.LATER,
    )
