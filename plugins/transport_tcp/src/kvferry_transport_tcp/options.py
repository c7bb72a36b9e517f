"""Keys of the section ``channel:`` beside ``use: tcp``."""

from __future__ import annotations

from attrs import Attribute, field, frozen

from kvferry_transport_tcp.address import parse_address

DEFAULT_LISTEN = "127.0.0.1:0"
LARGEST_CONNECTIONS = 64


class _Unusable(ValueError):
    """What a validator says of a value; the report shows ``remedy`` as its fix."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(what)
        self.remedy = remedy


def _listen(_self: object, _attribute: Attribute[list[str]], value: list[str]) -> None:
    if not value:
        raise _Unusable("names no address", f"name one for each rank, such as {DEFAULT_LISTEN}")
    for text in value:
        try:
            parse_address(text)
        except ValueError as error:
            raise _Unusable(
                f"holds an address that cannot be used: {error}", "write 10.0.0.1:9960 or [::1]:9960"
            ) from None


def _advertise(_self: object, _attribute: Attribute[list[str]], value: list[str]) -> None:
    for text in value:
        try:
            address = parse_address(text)
        except ValueError as error:
            raise _Unusable(
                f"holds an address that cannot be used: {error}",
                "write 10.0.0.1:9960; the port 0 stands for the one that is listened at",
            ) from None
        if address.wildcard:
            raise _Unusable(f"{text!r} is an address that no peer can reach", "name this machine's own")


def _connections(_self: object, _attribute: Attribute[int], value: int) -> None:
    if value < 1:
        raise _Unusable("is below 1", "write 1 or more, or remove the key")
    if value > LARGEST_CONNECTIONS:
        raise _Unusable(
            f"is above {LARGEST_CONNECTIONS}", f"write {LARGEST_CONNECTIONS} or less, or remove the key"
        )


def _variable(_self: object, _attribute: Attribute[str], value: str) -> None:
    if value and (not value.isprintable() or "=" in value or " " in value):
        raise _Unusable(
            "is no name of an environment variable",
            "name the variable that holds the secret, never the secret itself",
        )


@frozen(kw_only=True)
class TCPOptions:
    """Own keys of the channel."""

    listen: list[str] = field(
        factory=lambda: [DEFAULT_LISTEN],
        validator=_listen,
        metadata={
            "doc": "where ranks listen, one host:port for each; one entry with the port 0 serves all ranks, "
            "and the system chooses the ports"
        },
    )
    advertise: list[str] = field(
        factory=list,
        validator=_advertise,
        metadata={
            "doc": "what peers are told in its place, one host:port for each rank, or one for all with "
            "the port 0, which stands for the one that is listened at"
        },
    )
    connections: int = field(
        default=4,
        validator=_connections,
        metadata={"doc": "TCP connections that carry bytes to one peer at the same time"},
    )
    secret_variable: str = field(
        default="",
        validator=_variable,
        metadata={"doc": "environment variable that holds a secret, which all peers must know"},
    )
