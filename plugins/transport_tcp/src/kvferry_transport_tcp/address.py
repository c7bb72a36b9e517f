"""Addresses as a configuration writes them: ``host:port``, ``[::1]:9960``."""

from __future__ import annotations

import ipaddress

from attrs import frozen

LARGEST_PORT = 65535
_LOOPBACK_NAMES = frozenset(("localhost", "localhost.localdomain", "ip6-localhost"))


@frozen
class Address:
    """A host, by name or number and without brackets, and a port from 0 to 65535."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def loopback(self) -> bool:
        """Whether nobody but this machine can reach it, as far as it can be told without asking for
        names."""
        number = _number(self.host)
        return number.is_loopback if number else self.host.lower() in _LOOPBACK_NAMES

    @property
    def wildcard(self) -> bool:
        """Whether it stands for every address of the machine."""
        number = _number(self.host)
        return number is not None and number.is_unspecified

    def excludes(self, other: Address) -> bool:
        """Whether nobody can listen at ``other`` of this machine while somebody listens here, as far as it
        can be told without asking for names. The port 0 excludes nothing: the system chooses another."""
        if not self.port or self.port != other.port:
            return False
        mine, theirs = _number(self.host), _number(other.host)
        # With IPv6, every address of the machine includes those of IPv4; not the other way round.
        for every, one in ((mine, theirs), (theirs, mine)):
            if every is not None and every.is_unspecified:
                return every.version == 6 or one is None or one.version == 4 or one.is_unspecified
        if mine is None or theirs is None:
            return self.host.lower() == other.host.lower() or (self.loopback and other.loopback)
        return (mine, self._zone) == (theirs, other._zone)

    @property
    def _zone(self) -> str:
        return self.host.partition("%")[2]


def parse_address(text: str) -> Address:
    """Inverse of ``str``. Raises ``ValueError`` with one sentence that says what is wrong."""
    host, colon, port = text.rpartition(":")
    if not colon or not port:
        raise ValueError(f"{text!r} has no port")
    if not (port.isascii() and port.isdigit()) or int(port) > LARGEST_PORT:
        raise ValueError(f"{port!r} is no port from 0 to {LARGEST_PORT}")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        if ":" not in host:
            raise ValueError(f"{host!r} stands in brackets, which are for IPv6")
    elif ":" in host:
        raise ValueError(f"an IPv6 address stands in brackets, such as [{host}]:{port}")
    if not host:
        raise ValueError(f"{text!r} names no host")
    if any(character.isspace() or not character.isprintable() for character in host):
        raise ValueError(f"{host!r} is no name of a host")
    if ":" in host and _number(host) is None:
        raise ValueError(f"{host!r} is no IPv6 address")
    return Address(host, int(port))


def _number(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
