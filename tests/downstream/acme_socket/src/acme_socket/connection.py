"""The way to one peer: a thread that asks for one operation after the other."""

import contextlib
import json
import socket
import threading
from collections import deque

from acme_socket.memory import Memory
from acme_socket.wire import ANSWER, ASK, LARGEST_LIST, receive
from kvferry.api import ErrorKind, ItemResult, KVFerryError, RemoteRegion, Retry, Ticket, TransferStatus

LOOK_SECONDS = 0.02  # how late a ticket may end, while its thread waits for the peer


class Call:
    """One ``read``: its operations, and what became of them so far."""

    def __init__(self, operations, deadline: float) -> None:
        self.operations = tuple(operations)
        self.deadline = deadline
        self.results: list[ItemResult] = []
        self.ticket: Ticket[TransferStatus] = Ticket(len(self.operations))
        self.ended = False


class SocketConnection:
    def __init__(self, owner, sock: socket.socket, memory: Memory, clock, late) -> None:
        self.owner = owner
        self._socket = sock
        self._memory = memory
        self._clock = clock
        self._calls: deque[Call] = deque()
        self._changed = threading.Condition()
        self._over: KVFerryError | None = None
        length = int.from_bytes(receive(sock, 4, late), "little")
        if length > LARGEST_LIST:
            raise KVFerryError("the peer's regions cannot be read", kind=ErrorKind.PROTOCOL)
        lengths = json.loads(receive(sock, length, late))
        self._regions = {name: RemoteRegion(name=name, length=size) for name, size in lengths.items()}
        sock.settimeout(LOOK_SECONDS)
        self.thread = threading.Thread(target=self._work, name="acme-asks", daemon=True)
        self.thread.start()

    # -- the contract ----------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        return self._over is None

    def regions(self):
        return dict(self._regions)

    def close(self) -> None:
        self.end(KVFerryError("the connection was closed", kind=ErrorKind.CLOSED))
        if threading.current_thread() is not self.thread:
            self.thread.join()

    # -- for the channel -------------------------------------------------------------------------

    def submit(self, operations, deadline: float) -> Ticket[TransferStatus]:
        call = Call(operations, deadline)
        with self._changed:
            if self._over is None:
                self._calls.append(call)
                self._changed.notify()
        if self._over is not None:
            self._finish(call, self._over)
        call.ticket.on_cancel(lambda _ticket: self._finish(call, _cancelled()))
        return call.ticket

    def end(self, reason: KVFerryError) -> None:
        """No more of it; the first reason stands."""
        with self._changed:
            if self._over is None:
                self._over = reason
            calls, self._calls = list(self._calls), deque()
            self._changed.notify()
        for call in calls:
            self._finish(call, self._over)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes our thread, and the peer's

    # -- the work --------------------------------------------------------------------------------

    def _work(self) -> None:
        with self._socket:
            while (call := self._next()) is not None:
                try:
                    for operation in call.operations:
                        self._look()
                        if call.ended:
                            break
                        call.results.append(self._result(call, operation))
                except OSError as error:
                    self.end(KVFerryError("the peer is gone", kind=ErrorKind.IO, why=str(error)))
                self._finish(call, None)

    def _next(self) -> Call | None:
        """The call at the front, which stays there until it has ended."""
        with self._changed:
            while self._over is None:
                while self._calls and self._calls[0].ended:
                    self._calls.popleft()
                if self._calls:
                    return self._calls[0]
                self._changed.wait()
        return None

    def _result(self, call: Call, operation) -> ItemResult:
        span, region, offset = operation
        try:
            self._memory.check(span.region, span.offset, span.length)
            data = self._ask(region.encode(), offset, span.length)
            self._memory.write(span.region, span.offset, data, lambda: not call.ended)
        except KVFerryError as error:
            return ItemResult(TransferStatus.FAILED, error)
        return ItemResult(TransferStatus.DONE)

    def _ask(self, region: bytes, offset: int, length: int) -> bytearray:
        if len(region) >= 1 << 16 or not 0 <= offset < 1 << 63:
            raise _not_there()
        self._send(ASK.pack(len(region), offset, length) + region)
        status, size = ANSWER.unpack(receive(self._socket, ANSWER.size, self._look))
        if status == 1:
            raise _not_there()
        if size != length:
            raise ConnectionError(f"the peer answers {size} bytes to a question about {length}")
        # Into memory of ours: the span may be somebody else's before all of it has come.
        return receive(self._socket, size, self._look)

    def _send(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[self._socket.send(view) :]
            except TimeoutError:
                self._look()

    def _look(self) -> None:
        """End what is too late, whether or not the peer does anything."""
        if self._over is not None:
            raise ConnectionError(str(self._over))
        with self._changed:
            late = [call for call in self._calls if self._clock() >= call.deadline]
        for call in late:
            self._finish(call, KVFerryError("too late", kind=ErrorKind.TIMEOUT, retry=Retry.LATER))

    def _finish(self, call: Call, reason: KVFerryError | None) -> None:
        """End a call once; what it has no result for fails with the reason."""
        with self._changed:
            if call.ended:
                return
            call.ended = True
            done = list(call.results)
        missing = [ItemResult(TransferStatus.FAILED, reason) for _ in call.operations[len(done) :]]
        self._memory.settle()
        call.ticket.complete([*done, *missing])


def _not_there() -> KVFerryError:
    return KVFerryError("the peer has not registered these bytes", kind=ErrorKind.PROTOCOL)


def _cancelled() -> KVFerryError:
    return KVFerryError("the call was cancelled", kind=ErrorKind.CANCELLED)
