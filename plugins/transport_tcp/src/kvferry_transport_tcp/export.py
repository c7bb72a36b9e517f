"""What a channel tells peers of itself, so that they can connect."""

from __future__ import annotations

import struct

from attrs import frozen

from kvferry.api import ErrorKind, KVFerryError
from kvferry_transport_tcp.address import LARGEST_PORT, Address

_HEAD = struct.Struct("<4sHHI16sHH")
"""Magic, wire version, port, rank, epoch, bytes of the host, bytes of the instance."""
_MAGIC = b"KVFX"
EPOCH_BYTES = 16


@frozen(kw_only=True)
class Export:
    """One rank of one instance in one epoch, and where it listens."""

    version: int
    """Of the wire protocol."""
    address: Address
    instance: str
    rank: int
    epoch: bytes

    def to_bytes(self) -> bytes:
        host, instance = self.address.host.encode(), self.instance.encode()
        head = _HEAD.pack(
            _MAGIC, self.version, self.address.port, self.rank, self.epoch, len(host), len(instance)
        )
        return head + host + instance

    @classmethod
    def parse(cls, data: bytes) -> Export:
        """Inverse of :meth:`to_bytes`. Raises :class:`KVFerryError` (``PROTOCOL``) for anything else."""
        try:
            magic, version, port, rank, epoch, host_bytes, instance_bytes = _HEAD.unpack_from(data)
            names = data[_HEAD.size :]
            host, instance = names[:host_bytes].decode(), names[host_bytes:].decode()
        except (struct.error, UnicodeDecodeError):
            raise _foreign("they do not have its form") from None
        if magic != _MAGIC:
            raise _foreign("they do not begin as such")
        if len(names) != host_bytes + instance_bytes or not host or not 0 < port <= LARGEST_PORT:
            raise _foreign("they do not have its form")
        if not host.isprintable():
            raise _foreign("they name a host that is none")
        return cls(version=version, address=Address(host, port), instance=instance, rank=rank, epoch=epoch)


def _foreign(why: str) -> KVFerryError:
    return KVFerryError(
        "these bytes are no export of a TCP channel",
        kind=ErrorKind.PROTOCOL,
        why=why,
        remedy="let both sides use the channel tcp of one release",
    )
