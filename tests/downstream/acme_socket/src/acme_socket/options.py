"""What a user may say about a socket channel."""

from attrs import field, frozen


@frozen(kw_only=True)
class SocketOptions:
    """Own keys of the section ``channel:``, beside ``use``."""

    prefix: str = field(default="acme", metadata={"doc": "first part of the sockets' names"})
