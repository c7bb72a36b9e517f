"""Entry module: describes, and imports no implementation."""

from kvferry.api import ChannelCapabilities, ChannelSpec, Manifest, hookimpl

MANIFEST = Manifest(
    name="acme_socket",
    api=">=1.0,<2",
    rule_prefix="SOCK",
    summary="a channel over Unix sockets",
)


@hookimpl
def kvferry_channels():
    return [
        ChannelSpec(
            name="socket",
            factory="acme_socket.channel:SocketChannel",
            options="acme_socket.options:SocketOptions",
            capabilities=ChannelCapabilities(write=False, same_host=True),
            summary="peers of one user on one Linux host, which answer for their memory",
        )
    ]
