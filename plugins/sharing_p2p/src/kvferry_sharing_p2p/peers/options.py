"""Keys of the section ``p2p:`` beside those of core, with ``use: p2p``."""

from __future__ import annotations

from attrs import Attribute, field, frozen

from kvferry_sharing_p2p.network.endpoint import parse_url
from kvferry_sharing_p2p.network.options import Unusable

DEFAULT_LISTEN = "tcp://127.0.0.1:0"


def _url(_self: object, _attribute: Attribute[str], value: str) -> None:
    try:
        parse_url(value)
    except ValueError as error:
        raise Unusable(f"cannot be used: {error}", f"write it as {DEFAULT_LISTEN}") from None


def _told(self: P2POptions, attribute: Attribute[str], value: str) -> None:
    if not value:
        return
    _url(self, attribute, value)
    if parse_url(value).wildcard:
        raise Unusable(f"{value!r} is an address that nobody can reach", "name this host's own address")


@frozen(kw_only=True)
class P2POptions:
    """Own keys of the source."""

    listen: str = field(
        default=DEFAULT_LISTEN,
        validator=_url,
        metadata={"doc": "where peers reach this scheduler, tcp://host:port; the port 0 takes a free one"},
    )
    advertise: str = field(
        default="",
        validator=_told,
        metadata={"doc": "what peers are told instead of it; the port 0 stands for the one listened at"},
    )
