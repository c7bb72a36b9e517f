"""Addresses as a configuration and a command line write them: ``tcp://10.0.0.1:9900``, ``[::1]:9901``."""

from __future__ import annotations

import ipaddress
import socket

from attrs import frozen

LARGEST_PORT = 65535
_SCHEME = "tcp://"
_LOOPBACK_NAMES = frozenset(("localhost", "localhost.localdomain", "ip6-localhost"))


@frozen
class Endpoint:
    """A host, by name or number and without brackets, and a port from 0 to 65535."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """As ZeroMQ takes it."""
        return f"{_SCHEME}{self}"

    @property
    def is_version_6(self) -> bool:
        return ":" in self.host

    @property
    def wildcard(self) -> bool:
        """Whether it stands for every address of the machine."""
        number = _number(self.host)
        return number is not None and number.is_unspecified

    def is_loopback(self) -> bool:
        """Whether nobody but this machine reaches it. Of a name, that was not resolved, it is not known."""
        number = _number(self.host)
        return number is not None and number.is_loopback

    def stays_here(self) -> bool:
        """As :meth:`is_loopback`, and a name that stands for loopback everywhere counts."""
        return self.is_loopback() or self.host.lower() in _LOOPBACK_NAMES

    def excludes(self, other: Endpoint) -> bool:
        """Whether nobody can listen at ``other`` of this machine while somebody listens here, as far as it
        can be told without asking for names. The port 0 excludes nothing: the system chooses another."""
        if not self.port or self.port != other.port:
            return False
        mine, theirs = _number(self.host), _number(other.host)
        if mine is None or theirs is None:
            alike = self.host.lower() == other.host.lower() or (self.stays_here() and other.stays_here())
            return alike or self.wildcard or other.wildcard
        if mine.version != theirs.version:
            return False
        return mine == theirs or mine.is_unspecified or theirs.is_unspecified

    def resolved(self) -> Endpoint:
        """The same with a number for a name, of IPv4 if it has one, as ZeroMQ has it. May ask for names,
        which takes its time. Raises ``OSError``."""
        if _number(self.host) is not None:
            return self
        found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        best = min(found, key=lambda each: each[0] != socket.AF_INET)
        return Endpoint(str(best[4][0]), self.port)


def parse_url(text: str) -> Endpoint:
    """Of ``tcp://host:port``. Raises ``ValueError`` with one sentence that says what is wrong."""
    if not text.startswith(_SCHEME):
        raise ValueError(f"{text!r} does not begin with {_SCHEME}")
    return parse_host_port(text.removeprefix(_SCHEME))


def parse_host_port(text: str) -> Endpoint:
    """Of ``host:port`` or ``[::1]:port``. Raises ``ValueError`` with one sentence that says what is wrong."""
    host, colon, port = text.rpartition(":")
    if not colon or not port:
        raise ValueError(f"{text!r} has no port")
    if not (port.isascii() and port.isdigit()) or int(port) > LARGEST_PORT:
        raise ValueError(f"{port!r} is no port from 0 to {LARGEST_PORT}")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        if not isinstance(_number(host), ipaddress.IPv6Address):
            raise ValueError(f"{host!r} is no IPv6 address, and brackets are for those")
    elif ":" in host:
        raise ValueError(f"{text!r} has several colons; an IPv6 address stands in brackets, as [::1]:9900")
    if not host:
        raise ValueError(f"{text!r} names no host")
    if not host.isascii() or not all(letter.isalnum() or letter in "-._:%" for letter in host):
        raise ValueError(f"{host!r} is no name of a host")
    return Endpoint(host, int(port))


def _number(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
