"""P2P001 and following: what must hold for sharing between instances.

An address that cannot be read is refused with the configuration; rules say nothing of it.
"""

from __future__ import annotations

from kvferry.api import Check, Example, Path, Rule, Severity
from kvferry_sharing_p2p.network.endpoint import parse_url

_IS_CONTROLLER = Path("lookup.use") == "controller"
_LOOPBACK_NAMES = frozenset(("localhost", "localhost.localdomain", "ip6-localhost"))


def _lookup(url: str, *, file: str = "", variable: str = "") -> dict[str, object]:
    return {
        "lookup.use": "controller",
        "lookup.url": url,
        "lookup.secret_file": file,
        "lookup.secret_variable": variable,
    }


def _stays_here(url: str) -> bool:
    try:
        endpoint = parse_url(url)
    except ValueError:
        return True
    return endpoint.is_loopback() or endpoint.host.lower() in _LOOPBACK_NAMES


RULES: tuple[Rule, ...] = (
    Rule(
        id="P2P001",
        severity=Severity.ERROR,
        when=_IS_CONTROLLER,
        require=Check("lookup.url is loopback", ("lookup.url",), _stays_here)
        | (Path("lookup.secret_file") != "")
        | (Path("lookup.secret_variable") != ""),
        message="the controller at {lookup.url} is reached without a shared secret: one that listens beyond "
        "loopback demands it and will not answer, and whoever took its place would be believed",
        fix="set secret_file or secret_variable, as the controller was started with",
        source="design",
        examples=(
            Example(facts=_lookup("tcp://127.0.0.1:9900"), passes=True),
            Example(facts=_lookup("tcp://localhost:9900"), passes=True),
            Example(facts=_lookup("tcp://10.0.0.1:9900", variable="KVFERRY_SECRET"), passes=True),
            Example(facts=_lookup("tcp://10.0.0.1:9900", file="/etc/kvferry/secret"), passes=True),
            Example(facts=_lookup("tcp://10.0.0.1:9900"), passes=False),
            Example(facts=_lookup("tcp://node-1:9900"), passes=False),
        ),
    ),
    Rule(
        id="P2P002",
        severity=Severity.ERROR,
        when=_IS_CONTROLLER,
        require=(Path("lookup.secret_file") == "") | (Path("lookup.secret_variable") == ""),
        message="two places of the controller's secret are named: the file {lookup.secret_file} and the "
        "variable {lookup.secret_variable}",
        fix="name one of them",
        source="design",
        examples=(
            Example(facts=_lookup("tcp://10.0.0.1:9900", file="/etc/kvferry/secret"), passes=True),
            Example(facts=_lookup("tcp://127.0.0.1:9900"), passes=True),
            Example(facts=_lookup("tcp://10.0.0.1:9900", file="f", variable="V"), passes=False),
        ),
    ),
)
