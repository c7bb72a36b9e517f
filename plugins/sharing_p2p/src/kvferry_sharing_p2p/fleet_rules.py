"""P2P016 to P2P018: what must hold between the addresses of two instances."""

from __future__ import annotations

from kvferry.api import Check, Example, Path, Rule, Scope, Severity
from kvferry_sharing_p2p.network.endpoint import Endpoint, parse_url

BOTH_P2P = (Path("one.p2p.use") == "p2p") & (Path("other.p2p.use") == "p2p")
_LISTENS = ("one.p2p.listen", "other.p2p.listen")
_URLS = ("one.lookup.url", "other.lookup.url")
_BOTH_ASK = (Path("one.lookup.use") == "controller") & (Path("other.lookup.use") == "controller")


def _read(url: str) -> Endpoint | None:
    """``None`` for what is refused with the configuration."""
    try:
        return parse_url(url)
    except ValueError:
        return None


def _apart(one: str, other: str) -> bool:
    mine, theirs = _read(one), _read(other)
    return mine is None or theirs is None or not mine.excludes(theirs)


def _reach_alike(one: str, other: str) -> bool:
    mine, theirs = _read(one), _read(other)
    return mine is None or theirs is None or mine.stays_here() == theirs.stays_here()


def _same(one: str, other: str) -> bool:
    mine, theirs = _read(one), _read(other)
    if mine is None or theirs is None:
        return True
    same_host = mine.host.lower() == theirs.host.lower() or (mine.stays_here() and theirs.stays_here())
    return same_host and mine.port == theirs.port


def _pair(key: str, one: str, other: str) -> dict[str, object]:
    facts: dict[str, object] = {}
    for word, url in (("one", one), ("other", other)):
        facts |= {f"{word}.p2p.use": "p2p", f"{word}.lookup.use": "controller", f"{word}.{key}": url}
    return facts


FLEET_RULES: tuple[Rule, ...] = (
    Rule(
        id="P2P016",
        severity=Severity.ERROR,
        scope=Scope.PAIR,
        when=BOTH_P2P,
        require=Check("one.p2p.listen and other.p2p.listen are not one port", _LISTENS, _apart),
        message="two instances would be reached at one port: {one.p2p.listen}; {other.p2p.listen}",
        fix="give each a port of its own, or the port 0, which takes a free one",
        source="design",
        examples=(
            Example(facts=_pair("p2p.listen", "tcp://127.0.0.1:0", "tcp://127.0.0.1:0"), passes=True),
            Example(facts=_pair("p2p.listen", "tcp://10.0.0.1:9970", "tcp://10.0.0.2:9970"), passes=True),
            Example(facts=_pair("p2p.listen", "tcp://127.0.0.1:9970", "tcp://localhost:9970"), passes=False),
            Example(facts=_pair("p2p.listen", "tcp://0.0.0.0:9970", "tcp://10.0.0.2:9970"), passes=False),
        ),
    ),
    Rule(
        id="P2P017",
        severity=Severity.WARNING,
        scope=Scope.PAIR,
        when=BOTH_P2P,
        require=Check("both or neither of p2p.listen are loopback", _LISTENS, _reach_alike),
        message="one instance is reached by other hosts, and the other by its own alone: {one.p2p.listen}; "
        "{other.p2p.listen}; who runs elsewhere is told of chunks there and never gets them",
        fix="let both listen at addresses that all peers reach, or both at loopback",
        source="design",
        examples=(
            Example(facts=_pair("p2p.listen", "tcp://127.0.0.1:0", "tcp://localhost:9970"), passes=True),
            Example(facts=_pair("p2p.listen", "tcp://10.0.0.1:9970", "tcp://10.0.0.2:9970"), passes=True),
            Example(facts=_pair("p2p.listen", "tcp://127.0.0.1:0", "tcp://10.0.0.2:9970"), passes=False),
        ),
    ),
    Rule(
        id="P2P018",
        severity=Severity.WARNING,
        scope=Scope.PAIR,
        when=BOTH_P2P & _BOTH_ASK,
        require=Check("one.lookup.url and other.lookup.url are one directory", _URLS, _same),
        message="the instances ask different directories, so neither finds what the other has: "
        "{one.lookup.url}; {other.lookup.url}",
        fix="write the same url in both, of the one controller that all instances reach; from another host "
        "loopback is another controller",
        source="design",
        examples=(
            Example(facts=_pair("lookup.url", "tcp://127.0.0.1:9900", "tcp://localhost:9900"), passes=True),
            Example(facts=_pair("lookup.url", "tcp://10.0.0.9:9900", "tcp://10.0.0.9:9900"), passes=True),
            Example(facts=_pair("lookup.url", "tcp://127.0.0.1:9900", "tcp://10.0.0.9:9900"), passes=False),
            Example(facts=_pair("lookup.url", "tcp://10.0.0.9:9900", "tcp://10.0.0.9:9901"), passes=False),
        ),
    ),
)
