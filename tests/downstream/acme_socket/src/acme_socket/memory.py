"""Registered memory. Whoever touches it holds the lock, so that nothing is touched that was taken back."""

import ctypes
import threading

from kvferry.api import ErrorKind, KVFerryError, MemoryKind, Region


class Memory:
    def __init__(self) -> None:
        self._regions: dict[str, Region] = {}
        self._lock = threading.Lock()

    def add(self, region: Region) -> None:
        if region.kind is not MemoryKind.HOST:
            raise KVFerryError("memory of a device cannot be registered", kind=ErrorKind.UNSUPPORTED)
        with self._lock:
            if region.name in self._regions:
                raise KVFerryError(f"{region.name!r} is registered already", kind=ErrorKind.INTERNAL)
            self._regions[region.name] = region

    def remove(self, name: str) -> None:
        with self._lock:
            self._regions.pop(name, None)

    def clear(self) -> None:
        with self._lock:
            self._regions.clear()

    def lengths(self) -> dict[str, int]:
        with self._lock:
            return {name: region.length for name, region in self._regions.items()}

    def check(self, name: str, offset: int, length: int) -> None:
        with self._lock:
            self._address(name, offset, length)

    def read(self, name: str, offset: int, length: int) -> bytes:
        """For a peer. Both sides check: nobody believes the other."""
        with self._lock:
            return ctypes.string_at(self._address(name, offset, length), length)

    def write(self, name: str, offset: int, data: bytearray, wanted) -> None:
        """Bytes that came, unless ``wanted()`` is false by now: a ticket that ends meanwhile waits for the
        lock, so its spans are left alone from then on."""
        with self._lock:
            address = self._address(name, offset, len(data))
            if data and wanted():
                ctypes.memmove(address, (ctypes.c_char * len(data)).from_buffer(data), len(data))

    def settle(self) -> None:
        """When this returns, whatever was being written is written."""
        with self._lock:
            pass

    def _address(self, name: str, offset: int, length: int) -> int:
        region = self._regions.get(name)
        if region is None or offset < 0 or length < 0 or offset + length > region.length:
            raise KVFerryError(
                f"{length} bytes at {offset} of {name!r} are not registered", kind=ErrorKind.PROTOCOL
            )
        return region.address + offset
