"""TCP001 and following: what must hold for a channel over TCP.

Addresses that cannot be read are refused with the configuration; rules say nothing of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product

from kvferry.api import Check, Example, Known, Path, Rule, Scope, Severity
from kvferry_transport_tcp.address import Address, parse_address

_LISTEN = "channel.listen"
_ADVERTISE = "channel.advertise"
_SECRET = "channel.secret_variable"
_WORKERS = "engine.workers"
_IS_TCP = Path("channel.use") == "tcp"
_WITH_ENGINE = Known(_WORKERS) | Known("engine.block_tokens")
"""Where there is an engine, a number of workers that is not known is told and is not passed over."""
_BOTH_TCP = (Path("one.channel.use") == "tcp") & (Path("other.channel.use") == "tcp")


def _channel(
    *listen: str,
    advertise: tuple[str, ...] | None = None,
    secret: str | None = None,
    workers: int | None = None,
) -> dict[str, object]:
    more = {_ADVERTISE: advertise, _SECRET: secret, _WORKERS: workers}
    given = {path: value for path, value in more.items() if value is not None}
    return {"channel.use": "tcp", _LISTEN: listen, **given}


def _pair(one: str, other: str) -> dict[str, object]:
    return {
        f"{word}.{path}": value
        for word, text in (("one", one), ("other", other))
        for path, value in _channel(text).items()
    }


def _read(texts: Sequence[str]) -> list[Address]:
    return [parse_address(text) for text in texts]


def _serves_all(texts: Sequence[str]) -> bool:
    """One entry with the port 0 stands for every rank."""
    return len(texts) == 1 and not parse_address(texts[0]).port


def _stays_here(listen: Sequence[str]) -> bool:
    return all(address.loopback for address in _read(listen))


def _enough(texts: Sequence[str], workers: int) -> bool:
    return len(texts) >= workers


def _apart(listen: Sequence[str]) -> bool:
    return not any(one.excludes(other) for one, other in combinations(_read(listen), 2))


def _both_apart(one: Sequence[str], other: Sequence[str]) -> bool:
    return not any(mine.excludes(theirs) for mine, theirs in product(_read(one), _read(other)))


def _reach_alike(one: Sequence[str], other: Sequence[str]) -> bool:
    return _stays_here(one) == _stays_here(other)


def _reachable(listen: Sequence[str], advertise: Sequence[str]) -> bool:
    return bool(advertise) or not any(address.wildcard for address in _read(listen))


def _all_told(listen: Sequence[str], advertise: Sequence[str]) -> bool:
    return not advertise or _serves_all(advertise) or _serves_all(listen) or len(advertise) == len(listen)


def _there(listen: Sequence[str], advertise: Sequence[str]) -> bool:
    """No port is told where the system chooses which one is listened at."""
    listened = [address.port for address in _read(listen)]
    told = [address.port for address in _read(advertise)]
    if len(listened) == 1:
        listened *= len(told)
    return all(at or not port for at, port in zip(listened, told, strict=False))


RULES: tuple[Rule, ...] = (
    Rule(
        id="TCP001",
        severity=Severity.ERROR,
        when=_IS_TCP,
        require=Check("channel.listen is loopback", (_LISTEN,), _stays_here) | (Path(_SECRET) != ""),
        message="the channel listens at {channel.listen} without a shared secret: whoever reaches this may "
        "read and write the cache",
        fix="set secret_variable for all peers, or listen at a loopback address",
        source="design",
        examples=(
            Example(facts=_channel("127.0.0.1:9960", "[::1]:9960", secret=""), passes=True),
            Example(facts=_channel("0.0.0.0:9960", secret="KVFERRY_SECRET"), passes=True),
            Example(facts=_channel("127.0.0.1:9960", "10.0.0.1:9961", secret=""), passes=False),
            Example(facts=_channel("[::]:0", secret=""), passes=False),
        ),
    ),
    Rule(
        id="TCP002",
        severity=Severity.ERROR,
        when=_IS_TCP & _WITH_ENGINE,
        require=Check("channel.listen is one address with the port 0", (_LISTEN,), _serves_all)
        | Check("channel.listen has an address for each worker", (_LISTEN, _WORKERS), _enough),
        message="each of the {engine.workers} workers listens at an address of its own, and there are not as "
        "many: {channel.listen}",
        fix="list one address for each rank, or a single one with the port 0",
        source="design",
        examples=(
            Example(facts=_channel("127.0.0.1:9960", "127.0.0.1:9961", workers=2), passes=True),
            Example(facts=_channel("127.0.0.1:0", workers=8), passes=True),
            Example(facts=_channel("127.0.0.1:9960", workers=2), passes=False),
        ),
    ),
    Rule(
        id="TCP003",
        severity=Severity.ERROR,
        when=_IS_TCP,
        require=Check("no two of channel.listen have one host and port", (_LISTEN,), _apart),
        message="two ranks would listen at one port: {channel.listen}",
        fix="give each rank a port of its own",
        source="design",
        examples=(
            Example(facts=_channel("10.0.0.1:9960", "10.0.0.2:9960"), passes=True),
            Example(facts=_channel("10.0.0.1:0", "10.0.0.1:0"), passes=True),
            Example(facts=_channel("10.0.0.1:9960", "10.0.0.1:9960"), passes=False),
            Example(facts=_channel("0.0.0.0:9960", "10.0.0.1:9960"), passes=False),
        ),
    ),
    Rule(
        id="TCP004",
        severity=Severity.WARNING,
        when=_IS_TCP,
        require=Check(
            "channel.listen names addresses, or channel.advertise does", (_LISTEN, _ADVERTISE), _reachable
        ),
        message="the channel listens at every address of this machine ({channel.listen}), and peers are told "
        "the one from which it reaches the world, which they may not reach",
        fix="set advertise to the address that peers reach",
        source="design",
        examples=(
            Example(facts=_channel("10.0.0.1:9960", advertise=()), passes=True),
            Example(facts=_channel("0.0.0.0:9960", advertise=("10.0.0.1:9960",)), passes=True),
            Example(facts=_channel("0.0.0.0:9960", advertise=()), passes=False),
        ),
    ),
    Rule(
        id="TCP005",
        severity=Severity.ERROR,
        when=_IS_TCP,
        require=Check(
            "channel.advertise has as many addresses as channel.listen, or one of them stands for all",
            (_LISTEN, _ADVERTISE),
            _all_told,
        ),
        message="peers are told {channel.advertise} in place of {channel.listen}, and it is not clear which "
        "stands for which",
        fix="list as many addresses as in listen, or a single one with the port 0",
        source="design",
        examples=(
            Example(facts=_channel("0.0.0.0:1", "0.0.0.0:2", advertise=("10.0.0.1:0",)), passes=True),
            Example(facts=_channel("0.0.0.0:0", advertise=("10.0.0.1:0", "10.0.0.2:0")), passes=True),
            Example(facts=_channel("127.0.0.1:0", advertise=()), passes=True),
            Example(facts=_channel("0.0.0.0:1", "0.0.0.0:2", advertise=("10.0.0.1:7",)), passes=False),
        ),
    ),
    Rule(
        id="TCP006",
        severity=Severity.ERROR,
        when=_IS_TCP & _WITH_ENGINE & Check("channel.advertise is set", (_ADVERTISE,), bool),
        require=Check("channel.advertise is one address with the port 0", (_ADVERTISE,), _serves_all)
        | Check("channel.advertise has an address for each worker", (_ADVERTISE, _WORKERS), _enough),
        requires=("TCP002", "TCP005"),
        message="peers are told an address for each of the {engine.workers} workers, and there are not as "
        "many: {channel.advertise}",
        fix="list one address for each rank, or a single one with the port 0",
        source="design",
        examples=(
            Example(facts=_channel("0.0.0.0:0", advertise=("10.0.0.1:0",), workers=8), passes=True),
            Example(
                facts=_channel("0.0.0.0:0", advertise=("10.0.0.1:0", "10.0.0.2:0"), workers=2), passes=True
            ),
            Example(
                facts=_channel("0.0.0.0:0", advertise=("10.0.0.1:0", "10.0.0.2:0"), workers=4), passes=False
            ),
        ),
    ),
    Rule(
        id="TCP007",
        severity=Severity.ERROR,
        when=_IS_TCP,
        require=Check(
            "channel.advertise has the port 0 wherever channel.listen has", (_LISTEN, _ADVERTISE), _there
        ),
        requires=("TCP005",),
        message="peers are told a port ({channel.advertise}) where the system chooses the one that is "
        "listened at ({channel.listen}), so nobody would be there",
        fix="write the port 0 in advertise, which stands for the one that is listened at, or a port of your "
        "own in listen",
        source="design",
        examples=(
            Example(facts=_channel("0.0.0.0:0", advertise=("10.0.0.1:0",)), passes=True),
            Example(facts=_channel("0.0.0.0:9960", advertise=("203.0.113.5:31000",)), passes=True),
            Example(facts=_channel("0.0.0.0:0", advertise=("10.0.0.1:9960",)), passes=False),
        ),
    ),
    Rule(
        id="TCP008",
        severity=Severity.ERROR,
        scope=Scope.PAIR,
        when=_BOTH_TCP,
        require=Check(
            "no address of one.channel.listen is in other.channel.listen",
            (f"one.{_LISTEN}", f"other.{_LISTEN}"),
            _both_apart,
        ),
        message="two instances would listen at one port: {one.channel.listen}; {other.channel.listen}",
        fix="give each instance ports of its own, or an address with the port 0",
        source="design",
        examples=(
            Example(facts=_pair("127.0.0.1:9960", "127.0.0.1:9961"), passes=True),
            Example(facts=_pair("127.0.0.1:0", "127.0.0.1:0"), passes=True),
            Example(facts=_pair("127.0.0.1:9960", "localhost:9960"), passes=False),
            Example(facts=_pair("0.0.0.0:9960", "10.0.0.1:9960"), passes=False),
        ),
    ),
    Rule(
        id="TCP009",
        severity=Severity.WARNING,
        scope=Scope.PAIR,
        when=_BOTH_TCP,
        require=Check(
            "both or neither of channel.listen are loopback alone",
            (f"one.{_LISTEN}", f"other.{_LISTEN}"),
            _reach_alike,
        ),
        requires=("TCP001",),
        message="one instance is reached by other hosts, and the other by its own alone: "
        "{one.channel.listen}; {other.channel.listen}; who runs elsewhere cannot read from it",
        fix="let both listen at addresses that all peers reach, or both at loopback",
        source="design",
        examples=(
            Example(facts=_pair("127.0.0.1:0", "[::1]:9960"), passes=True),
            Example(facts=_pair("10.0.0.1:9960", "0.0.0.0:9961"), passes=True),
            Example(facts=_pair("127.0.0.1:0", "10.0.0.1:9960"), passes=False),
        ),
    ),
)
