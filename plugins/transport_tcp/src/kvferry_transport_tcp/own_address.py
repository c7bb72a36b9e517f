"""Which address of this machine peers most likely reach."""

from __future__ import annotations

import socket

_ELSEWHERE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
"""Addresses that documents use. Nothing is sent there: only the way there is asked for."""
_LOOPBACK = {socket.AF_INET: "127.0.0.1", socket.AF_INET6: "::1"}


def own_address(wildcard: str) -> str:
    """The address from which this machine speaks to the world, of the family of ``wildcard``; the loopback
    address where there is no way out."""
    family = socket.AF_INET6 if ":" in wildcard else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect((_ELSEWHERE[family], 9))
            return str(sock.getsockname()[0])
    except OSError:
        return _LOOPBACK[family]
