"""Makes a channel in a process of its own, for the kit's laws about peers that die and stand still."""

from acme_socket.channel import SocketChannel
from acme_socket.options import SocketOptions


def make():
    return SocketChannel(SocketOptions())
