"""Whether the directory can be asked, and how things stand with it."""

from __future__ import annotations

import enum
import logging

from attrs import frozen

from kvferry_sharing_p2p.directory.publisher import PublisherState, PublisherStatus
from kvferry_sharing_p2p.network.endpoint import Endpoint

logger = logging.getLogger(__name__)


class Reach(enum.Enum):
    """Whether the directory can be asked. The values are words for people.

    A wrong secret cannot be told from a wrong address for sure: who does not know it is not answered.
    """

    NO_ANSWER = "no answer: nobody listens there (yet)"
    TURNED_AWAY = (
        "no answer: somebody listens there, and the address or the secret is wrong, or it stands still"
    )
    CONNECTED = "connected"
    SILENT = "connected, and it does not answer any more"
    CLOSED = "closed"


@frozen(kw_only=True)
class ClientStatus:
    """How things stand between an instance and the directory."""

    reach: Reach
    publisher: PublisherStatus
    finds: int
    """That are under way."""
    unreadable: int
    """Frames that were no messages."""


class Complaints:
    """Logs what only people can mend, once each time that it begins."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._said: Reach | PublisherState | None = None

    def look(self, status: ClientStatus) -> None:
        where, state = self._endpoint.url, status.publisher.state
        if status.reach is Reach.TURNED_AWAY:
            if self._said is not status.reach:
                logger.warning("kvferry: the directory at %s: %s", where, status.reach.value)
            self._said = status.reach
        elif state is PublisherState.REFUSED:
            if self._said is not state:
                refusal = status.publisher.refusal
                logger.warning("kvferry: the directory at %s refuses this instance: %s", where, refusal)
            self._said = state
        elif state is PublisherState.CURRENT:
            self._said = None
