"""Keys of the section ``lookup:`` beside ``use: controller``."""

from __future__ import annotations

from attrs import Attribute, field, frozen

from kvferry_sharing_p2p.network.endpoint import parse_url

DEFAULT_URL = "tcp://127.0.0.1:9900"


class Unusable(ValueError):
    """What a validator says of a value; the report shows ``remedy`` as its fix."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(what)
        self.remedy = remedy


def _url(_self: object, _attribute: Attribute[str], value: str) -> None:
    remedy = f"write it as {DEFAULT_URL}"
    try:
        endpoint = parse_url(value)
    except ValueError as error:
        raise Unusable(f"cannot be used: {error}", remedy) from None
    if endpoint.wildcard:
        raise Unusable(f"{value!r} is an address that nobody can reach", "name the controller's own address")
    if not endpoint.port:
        raise Unusable(f"{value!r} has the port 0, which nobody listens at", remedy)


def _variable(_self: object, _attribute: Attribute[str], value: str) -> None:
    if value and (not value.isprintable() or "=" in value or " " in value):
        raise Unusable(
            "is no name of an environment variable",
            "name the variable that holds the secret, never the secret itself",
        )


@frozen(kw_only=True)
class ControllerOptions:
    """Own keys of the lookup."""

    url: str = field(
        default=DEFAULT_URL, validator=_url, metadata={"doc": "where the controller listens, tcp://host:port"}
    )
    secret_file: str = field(
        default="", metadata={"doc": "file that holds the secret which the controller was started with"}
    )
    secret_variable: str = field(
        default="",
        validator=_variable,
        metadata={"doc": "environment variable that holds the secret which the controller was started with"},
    )
