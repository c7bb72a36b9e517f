"""P2P001 and following: what must hold for sharing between instances, by their addresses first.

An address that cannot be read is refused with the configuration; rules say nothing of it.
"""

from __future__ import annotations

from kvferry.api import Check, Example, Path, Rule, Severity
from kvferry_sharing_p2p.fleet_rules import FLEET_RULES
from kvferry_sharing_p2p.likeness_rules import LIKENESS_RULES
from kvferry_sharing_p2p.mode_rules import MODE_RULES
from kvferry_sharing_p2p.network.endpoint import parse_url

_IS_CONTROLLER = Path("lookup.use") == "controller"
_IS_P2P = Path("p2p.use") == "p2p"


def _lookup(url: str, *, file: str = "", variable: str = "") -> dict[str, object]:
    return {
        "lookup.use": "controller",
        "lookup.url": url,
        "lookup.secret_file": file,
        "lookup.secret_variable": variable,
    }


def _listens(url: str) -> dict[str, object]:
    return {"p2p.use": "p2p", "p2p.listen": url}


def _over(channel: str, same_host: bool, listen: str) -> dict[str, object]:
    claims = {"channel.use": channel, "channel.capabilities.same_host": same_host}
    return {**claims, **_listens(listen)}


def _stays_here(url: str) -> bool:
    try:
        return parse_url(url).stays_here()
    except ValueError:
        return True


_ADDRESS_RULES: tuple[Rule, ...] = (
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
    Rule(
        id="P2P003",
        severity=Severity.ERROR,
        when=_IS_P2P,
        require=Path("lookup.use") == "controller",
        message="p2p asks a directory who has what, and the lookup is {lookup.use}",
        fix="set lookup.use to controller, and lookup.url to where that listens",
        source="design",
        examples=(
            Example(facts={"p2p.use": "p2p", "lookup.use": "controller"}, passes=True),
            Example(facts={"p2p.use": None, "lookup.use": None}, passes=True),
            Example(facts={"p2p.use": "p2p", "lookup.use": None}, passes=False),
        ),
    ),
    Rule(
        id="P2P004",
        severity=Severity.ERROR,
        when=_IS_P2P,
        require=Path("channel.use") != None,  # noqa: E711 - a formula, not a comparison
        message="p2p reads over a channel, and there is none",
        fix="set channel.use to tcp, or to another channel, and list its plugin",
        source="design",
        examples=(
            Example(facts={"p2p.use": "p2p", "channel.use": "tcp"}, passes=True),
            Example(facts={"p2p.use": "p2p", "channel.use": None}, passes=False),
        ),
    ),
    Rule(
        id="P2P005",
        severity=Severity.ERROR,
        when=_IS_P2P,
        require=Check("p2p.listen is loopback", ("p2p.listen",), _stays_here)
        | (Path("lookup.secret_file") != "")
        | (Path("lookup.secret_variable") != ""),
        message="peers are listened for at {p2p.listen} without a shared secret: whoever reaches this may "
        "ask for chunks",
        fix="set secret_file or secret_variable in lookup, as the controller was started with, or listen at "
        "a loopback address",
        source="design",
        requires=("P2P003",),
        examples=(
            Example(facts=_lookup("tcp://127.0.0.1:9900") | _listens("tcp://127.0.0.1:0"), passes=True),
            Example(
                facts=_lookup("tcp://10.0.0.1:9900", variable="KVFERRY_SECRET")
                | _listens("tcp://0.0.0.0:9970"),
                passes=True,
            ),
            Example(facts=_lookup("tcp://127.0.0.1:9900") | _listens("tcp://0.0.0.0:9970"), passes=False),
        ),
    ),
    Rule(
        id="P2P030",
        severity=Severity.WARNING,
        when=_IS_P2P & (Path("channel.use") != None),  # noqa: E711 - a formula, not a comparison
        require=Check(
            "not channel.capabilities.same_host, or p2p.listen is loopback",
            ("channel.capabilities.same_host", "p2p.listen", "channel.use"),
            lambda same_host, listen, _use: not same_host or _stays_here(listen),
        ),
        message="the channel {channel.use} reaches processes of this host alone, and peers of other hosts "
        "are told that they may ask at {p2p.listen}",
        fix="use a channel that reaches other hosts, such as tcp, or listen at a loopback address",
        source="design",
        examples=(
            Example(facts=_over("local", True, "tcp://127.0.0.1:0"), passes=True),
            Example(facts=_over("tcp", False, "tcp://10.0.0.1:9970"), passes=True),
            Example(facts=_over("local", True, "tcp://10.0.0.1:9970"), passes=False),
        ),
    ),
)

RULES: tuple[Rule, ...] = tuple(
    sorted((*_ADDRESS_RULES, *MODE_RULES, *FLEET_RULES, *LIKENESS_RULES), key=lambda rule: rule.id)
)
