"""One store file: opened past the page cache where that works, and grown when it must be."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

from kvferry.api import ErrorKind, KVFerryError, Retry
from kvferry_backend_ssd.block_io import BlockIO, Piece, Purpose
from kvferry_backend_ssd.bounce import Bounce
from kvferry_backend_ssd.faults import errno_text, fault, os_error
from kvferry_backend_ssd.folder import SetFolder
from kvferry_backend_ssd.huge_reads import HugeReads
from kvferry_backend_ssd.layout import PAGE, SUPERBLOCK_BYTES, Layout
from kvferry_backend_ssd.superblock import Superblock, Verdict

_log = logging.getLogger(__name__)

GROW_BYTES = 64 << 20
"""A file grows by as much at the least, up to the capacity."""
_NO_DIRECT = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTBLK}
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class StoreFile:
    """The file ``name`` of a folder, for as many slots as fit into ``room`` bytes.

    Threads: ``gone`` and ``reading`` from any; the rest one at a time.
    """

    def __init__(self, folder: SetFolder, name: str, superblock: Superblock, room: int) -> None:
        self.path = os.path.join(folder.path, name)
        self.layout = Layout(superblock.slot_bytes)
        self.slots = self.layout.slots_within(room)
        self.fd = -1
        self.direct = False
        self.damaged = False
        """Whether the file had contents and no superblock that could be read."""
        self.length = 0
        self._huge_reads: HugeReads | None = None
        self._folder = folder
        self._superblock = superblock
        self._room = room
        self._told_full = False

    @property
    def covered(self) -> int:
        """How many slots the file is long enough for."""
        return min(self.slots, self.layout.slots_within(self.length))

    def open(self, io: BlockIO, direct: bool) -> None:
        """Open or make the file. Raises :class:`KVFerryError` and leaves nothing open then."""
        if self.slots == 0:
            raise KVFerryError(
                "the capacity does not hold one chunk",
                kind=ErrorKind.CAPACITY,
                where=self.path,
                why=f"{self._room} bytes are left for a file whose slots have {self.layout.slot_bytes} each",
                remedy=f"set a capacity of {self.layout.bytes_for(1) + PAGE} bytes at the least, better many "
                "times that",
                retry=Retry.AFTER_CHANGE,
            )
        try:
            self._open(io, direct)
        except OSError as error:
            self.close()
            raise fault(error, "the store of the tier cannot be opened", self.path) from error
        except BaseException:
            self.close()
            raise

    def _open(self, io: BlockIO, direct: bool) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self.direct = direct and self._opens_direct(flags)
        if not self.direct:
            self._open_buffered(flags)
        self.length = os.fstat(self.fd).st_size
        new = self.length == 0
        whole = self.layout.bytes_for(self.covered)
        if self.length > whole:  # a lower capacity, or a part of a slot or of a table that would come back
            io.truncate(self.fd, whole)
            self.length = whole
        if self.length < SUPERBLOCK_BYTES:
            io.truncate(self.fd, SUPERBLOCK_BYTES)
            self.length = SUPERBLOCK_BYTES
        self._folder.make_room(self._room - self.length)
        verdict, pages = self._judge(io)
        if verdict is Verdict.OTHER:
            io.truncate(self.fd, 0)
            io.truncate(self.fd, SUPERBLOCK_BYTES)
            self.length = SUPERBLOCK_BYTES
        self.damaged = verdict is Verdict.DAMAGED and not new
        # Written in any case, which shows whether the file takes it. A damaged one stays so until what
        # it would have vouched for is found again.
        self._write(io, pages if self.damaged else self._superblock.to_page() * 2)
        # Durable before anything else is written, or after a power cut every slot would be looked at. Also
        # for a file that was there: who made it may have been killed before.
        io.flush(self.fd)
        self._folder.sync()

    def _opens_direct(self, flags: int) -> bool:
        try:
            self.fd = os.open(self.path, flags | os.O_DIRECT, 0o644)
        except OSError as error:
            if error.errno not in _NO_DIRECT:
                raise
            self._warn_buffered(error)
            return False
        return True

    def _judge(self, io: BlockIO) -> tuple[Verdict, bytes]:
        memory = Bounce(SUPERBLOCK_BYTES)
        view, address = memory.take(SUPERBLOCK_BYTES)
        piece = Piece(0, address, SUPERBLOCK_BYTES, Purpose.SUPERBLOCK)
        (result,) = io.read(self.fd, [piece])
        if -result in _NO_DIRECT and self.direct:
            self._without_direct(os_error(result))
            (result,) = io.read(self.fd, [piece])
        if result < 0:
            raise os_error(result)
        pages = bytes(view)
        verdicts = [self._superblock.judge(pages[at : at + PAGE]) for at in range(0, result, PAGE)]
        whole = [verdict for verdict in verdicts if verdict is not Verdict.DAMAGED]
        return whole[0] if whole else Verdict.DAMAGED, pages

    def mend(self, io: BlockIO) -> None:
        """Write the superblock anew. Raises ``OSError``."""
        self._write(io, self._superblock.to_page() * 2)
        io.flush(self.fd)
        self.damaged = False

    def _write(self, io: BlockIO, superblock: bytes) -> None:
        memory = Bounce(SUPERBLOCK_BYTES)
        view, address = memory.take(SUPERBLOCK_BYTES)
        view[:] = superblock
        pieces = [
            Piece(at, address + at, PAGE, Purpose.SUPERBLOCK) for at in range(0, SUPERBLOCK_BYTES, PAGE)
        ]
        results = io.write(self.fd, pieces)
        if self.direct and any(-result in _NO_DIRECT for result in results):
            self._without_direct(os_error(min(results)))
            results = io.write(self.fd, pieces)
        for result in results:
            if result != PAGE:
                raise os_error(result if result < 0 else -errno.EIO)

    def _without_direct(self, error: OSError) -> None:
        self._warn_buffered(error)
        os.close(self.fd)
        self.direct = False
        self._open_buffered(os.O_RDWR | os.O_CLOEXEC)

    def _open_buffered(self, flags: int) -> None:
        """Through the page cache, without the kernel's reading ahead: the pieces that are read at once are
        all that is wanted, and as one stream of reads they make no sense to it."""
        self.fd = os.open(self.path, flags, 0o644)
        os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_RANDOM)
        self._huge_reads = HugeReads(self.fd, self.layout.bytes_for(self.slots))

    def reading(self, stretches: Iterable[tuple[int, int]]) -> AbstractContextManager[None]:
        """Enter it around reads of these offsets and lengths, which makes them faster where it can. From
        any thread."""
        return nullcontext() if self._huge_reads is None else self._huge_reads.around(stretches)

    def _warn_buffered(self, error: OSError) -> None:
        _log.warning(
            "kvferry: the file system of %s does not take direct I/O (%s), so chunks go through the page "
            "cache; set  direct: false  to do without this line",
            self.path,
            errno_text(error.errno or errno.EINVAL),
        )

    def cover(self, slots: int, io: BlockIO) -> bool:
        """Make the file long enough for this many slots; whether the disk had the room.

        Raises ``OSError`` for anything but a lack of room.
        """
        need = self.layout.bytes_for(slots)
        if need <= self.length:
            return True
        most = self.layout.bytes_for(self.slots)
        self._folder.make_room(self._room - need)
        ahead = min(most, self.length + GROW_BYTES, self._room - self._folder.others_bytes)
        for target in (max(need, ahead), need):
            try:
                io.allocate(self.fd, self.length, target - self.length)
            except OSError as error:
                if error.errno not in _FULL:
                    raise
                io.truncate(self.fd, self.length)  # a part may have been reserved
                self._folder.make_room(0)
                self._tell_full(error)
                continue
            self.length = target
            return True
        return False

    def _tell_full(self, error: OSError) -> None:
        if not self._told_full:
            self._told_full = True
            told = fault(
                error, "the disk is full before the tier is, which goes on with what it has", self.path
            )
            _log.warning("kvferry: %s", told)

    def gone(self) -> KVFerryError | None:
        """The fault of a file that does not lie where it was opened any more."""
        try:
            found = os.stat(self.path)
            own = os.fstat(self.fd)
            if (found.st_dev, found.st_ino) == (own.st_dev, own.st_ino):
                return None
            error = OSError(errno.ENOENT, "the file there is another one")
        except OSError as raised:
            error = raised
        return fault(error, "the store of the tier vanished", self.path)

    def close(self) -> None:
        """Idempotent."""
        if self._huge_reads is not None:
            self._huge_reads.close()
            self._huge_reads = None
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
