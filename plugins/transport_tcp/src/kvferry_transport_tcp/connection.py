"""The way to one peer: hands frames to lanes, and sees to it that every ticket ends in time."""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from kvferry.api import KVFerryError, RemoteOp, RemoteRegion, Ticket, TransferStatus
from kvferry_transport_tcp.faults import (
    cancelled,
    closed,
    error_text,
    garbled,
    late,
    lost,
    of_status,
    outside,
)
from kvferry_transport_tcp.handshake import Refused
from kvferry_transport_tcp.jobs import Frame, Job, cut_into_frames, frame_bytes, remote_fits
from kvferry_transport_tcp.lane import WINDOW, Lane
from kvferry_transport_tcp.peer_clock import PeerClock
from kvferry_transport_tcp.registry import Registered, Registry
from kvferry_transport_tcp.sockets import Clock, Cuttable, Ended, receive_into
from kvferry_transport_tcp.watch import Watch
from kvferry_transport_tcp.wire import (
    HEADER_BYTES,
    Header,
    Kind,
    PieceStatus,
    Refusal,
    WireError,
    decode_header,
    decode_name,
)

Start = Callable[[Callable[[], None], str], None]
"""Runs something on a thread of its own, which has this name."""
Reach = Callable[[float, Callable[[Cuttable], None]], Cuttable]
"""Opens one more lane's socket by a deadline; what is given second is called with it at the very first."""
_CONFIRM_SECONDS = 1.0
"""How long a peer may take to confirm that a connection has ended."""
_GONE = (Refusal.EPOCH, Refusal.UNKNOWN_CONNECTION)
"""Who says this is not the peer, as it was, that we were connected to."""
_EARLY_SECONDS = 0.25
"""A peer stops at a deadline as it reads on its own clock, which is a little earlier. What ends so is late,
and not lost."""


class TCPConnection:
    """See :class:`kvferry.api.Connection`.

    ``control`` is a socket that was opened as such, ``reach`` opens lanes beside it, each of them with a
    thread. Locks: one, under which nothing waits but
    lanes without work.
    """

    def __init__(
        self,
        *,
        peer: str,
        owner: object,
        control: Cuttable,
        reach: Reach,
        registry: Registry,
        watch: Watch,
        clock: Clock,
        peer_clock: PeerClock,
        lanes: int,
        start: Start,
    ) -> None:
        self.peer = peer
        self.owner = owner
        """The channel that made it."""
        self._control = control
        self._reach = reach
        self._registry = registry
        self._watch = watch
        self._clock = clock
        self._peer_clock = peer_clock
        self._start = start
        self._changed = threading.Condition(threading.RLock())
        self._ended: KVFerryError | None = None
        self._regions: dict[str, RemoteRegion] = {}
        self._writing = False
        """Whether a write was under way when it ended."""
        self._quiet = threading.Event()
        """Set when the peer has confirmed the end, or does not do so in time."""
        self._queue: deque[Frame] = deque()
        self._jobs: set[Job] = set()
        self._lanes = [Lane(self) for _ in range(lanes)]

    # -- what core sees --------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        return self._ended is None

    def regions(self) -> Mapping[str, RemoteRegion]:
        with self._changed:
            return dict(self._regions)

    def close(self) -> None:
        self.end(closed("connection"))
        if self._writing:
            self._quiet.wait(_CONFIRM_SECONDS)

    def open(self, deadline: float) -> None:
        """Receive the list of regions, and open the lanes. Raises :class:`KVFerryError`, ``OSError`` and
        :class:`WireError`; the caller then ends it with :meth:`give_up`, and else goes on with
        :meth:`start`."""
        watched = self._watch.add(deadline, self._control.cut)
        try:
            while self._hear() is not Kind.TIME:
                pass
        finally:
            self._watch.forget(watched)
        for lane in self._lanes:
            self._reach(deadline, partial(self._hold, lane))

    def start(self) -> None:
        """Start the threads."""
        for number, lane in enumerate(self._lanes):
            self._start(lane.run, f"lane-{number}")
        self._start(self.hear_all, "listen")

    def give_up(self) -> None:
        """Close what could not be opened as a whole."""
        for lane in self._lanes:
            if lane.sock is not None:
                lane.sock.close()
        self._control.close()

    # -- the control connection ------------------------------------------------------------------

    def hear_all(self) -> None:
        """Receive what the peer tells, until one side ends. For a thread of its own."""
        try:
            while True:
                self._hear()
        except WireError as error:
            self.end(garbled(self.peer, str(error)))
        except Ended:
            self.end(lost(self.peer, "the peer has ended, or was stopped"))
        except OSError as error:
            self.end(lost(self.peer, error_text(error)))
        finally:
            self._control.close()
            self._quiet.set()

    def _hear(self) -> Kind:
        head = memoryview(bytearray(HEADER_BYTES))
        receive_into(self._control.sock, [head])
        header = decode_header(head)
        body = memoryview(bytearray(header.body))
        receive_into(self._control.sock, [body])
        self._heard(header, body)
        return header.kind

    def _heard(self, header: Header, body: memoryview) -> None:
        if header.kind is Kind.TIME:
            self._peer_clock.seen(header.time)
            return
        name = decode_name(body)
        with self._changed:
            if header.kind is Kind.REGION:
                self._regions[name] = RemoteRegion(name=name, length=header.number)
            elif header.kind is Kind.GONE:
                self._regions.pop(name, None)
            else:
                raise WireError(f"{header.kind.name} came where regions are told")

    # -- work ------------------------------------------------------------------------------------

    def submit(
        self, operations: Sequence[RemoteOp], deadline: float, *, writing: bool
    ) -> Ticket[TransferStatus]:
        """A ticket for these operations, which are all of one direction."""
        ticket: Ticket[TransferStatus] = Ticket(len(operations))
        job = Job(ticket, deadline, writing=writing)
        good: list[tuple[int, RemoteOp, Registered]] = []
        for item, operation in enumerate(operations):
            memory = self._registry.find(operation.local)
            if memory is None:
                job.fail(item, outside("here", f"{operation.local} lies in no registered region"))
            elif not remote_fits(operation):
                job.fail(item, outside(self.peer, f"there is no offset {operation.offset}"))
            else:
                good.append((item, operation, memory))
        total = sum(operation.local.length for _, operation, _ in good)
        frames = cut_into_frames(job, good, frame_bytes(total, len(self._lanes)))
        if frames:
            job.watched = self._watch.add(deadline, lambda: self._end_job(job, late(self.peer)))
        with self._changed:
            error = self._ended or (late(self.peer) if deadline <= self._clock() else None)
            if error is not None:
                job.fail_all(error)
            if not job.over:
                self._queue.extend(frames)
                self._jobs.add(job)
                self._changed.notify(len(frames))
        ticket.on_cancel(lambda _ticket: self._end_job(job, cancelled(self.peer)))
        self._settle([job])
        return ticket

    def _end_job(self, job: Job, error: KVFerryError) -> None:
        """The job ends with this error for what is not done, as soon as no lane can touch its spans."""
        with self._changed:
            if job.over:
                return
            job.fail_all(error)
            self._queue = deque(frame for frame in self._queue if frame.job is not job)
            for lane in self._lanes:
                if any(frame.job is job for frame in lane.flying):
                    lane.doom()
        self._settle([job])

    def _settle(self, jobs: Sequence[Job]) -> None:
        """Complete those of the jobs that are over. Not under the lock."""
        for job in jobs:
            with self._changed:
                ready = job.to_complete()
                if ready:
                    self._jobs.discard(job)
            if ready:
                self._watch.forget(job.watched)
                job.complete()

    # -- what lanes see --------------------------------------------------------------------------

    def take(self, lane: Lane) -> Frame | None:
        """See :class:`kvferry_transport_tcp.lane.Desk`."""
        while True:
            with self._changed:
                frame, gone = self._next(lane)
            self._settle(gone)
            if frame is not None or lane.flying:
                return frame
            with self._changed:
                if lane.doomed and lane.sock is not None:
                    raise lost(self.peer, "it was cut")
                if self._ended is not None:
                    return None
                if not self._queue:
                    self._changed.wait()

    def _next(self, lane: Lane) -> tuple[Frame | None, list[Job]]:
        """A frame that fits behind what the lane has, and jobs that may be over without it."""
        gone: list[Job] = []
        while self._queue and not lane.doomed and self._fits(lane, self._queue[0].job):
            frame = self._queue.popleft()
            job = frame.job
            for piece in frame.wanted():
                if piece.memory.gone:
                    job.fail(piece.item, outside("here", "the local region was taken back"))
            frame.pieces = frame.wanted()
            if frame.pieces:
                job.flying += 1
                lane.flying.append(frame)
                return frame, gone
            gone.append(job)
        return None, gone

    @staticmethod
    def _fits(lane: Lane, job: Job) -> bool:
        """A write travels alone. With another request before it that is not answered yet, both sides
        could wait for each other with full buffers; and a write that was cut off is never sent again, so
        it must not be cut off for the sake of another job."""
        if not lane.flying:
            return True
        return len(lane.flying) < WINDOW and not job.writing and not lane.flying[0].job.writing

    def reach(self, lane: Lane, frame: Frame) -> socket.socket:
        """See :class:`kvferry_transport_tcp.lane.Desk`."""
        try:
            return self._reach(frame.job.deadline, partial(self._hold, lane)).sock
        except KVFerryError as error:
            cause = error.__cause__
            if isinstance(cause, ConnectionRefusedError) or (
                isinstance(cause, Refused) and cause.reason in _GONE
            ):
                self.end(error)
            raise

    def _hold(self, lane: Lane, line: Cuttable) -> None:
        with self._changed:
            lane.sock = line
            if lane.doomed:
                line.cut()

    def wire_deadline(self, frame: Frame) -> int:
        """See :class:`kvferry_transport_tcp.lane.Desk`."""
        return self._peer_clock.at(frame.job.deadline)

    def landed(self, lane: Lane, statuses: list[PieceStatus], time: int) -> None:
        """See :class:`kvferry_transport_tcp.lane.Desk`."""
        self._peer_clock.seen(time)
        with self._changed:
            frame = lane.flying.popleft()
            job = frame.job
            job.flying -= 1
            for piece, status in zip(frame.pieces, statuses, strict=True):
                if status is PieceStatus.DONE:
                    job.done(piece.item)
                else:
                    job.fail(piece.item, of_status(status, self.peer))
            if any(piece.memory.gone for piece in frame.pieces):
                self._changed.notify_all()
        self._settle([job])

    def drop(self, lane: Lane, error: KVFerryError) -> None:
        """See :class:`kvferry_transport_tcp.lane.Desk`. A read that was cut off for the sake of another job
        is asked for again; a write is not, because its bytes may still be on their way."""
        if not lane.doomed and self._control.ended():
            self.end(lost(self.peer, "the peer has ended, or was stopped"))
        with self._changed:
            if lane.sock is not None:
                lane.sock.cut()
                lane.sock.close()
            soon = self._clock() + _EARLY_SECONDS
            frames = list(lane.flying)
            on_purpose = lane.doomed or any(frame.job.deadline < soon for frame in frames)
            for frame in reversed(frames):
                frame.job.flying -= 1
                is_late = frame.job.deadline < soon
                if on_purpose and not is_late and not frame.job.writing and self._ended is None:
                    self._queue.appendleft(frame)
                    continue
                for piece in frame.pieces:
                    frame.job.fail(piece.item, late(self.peer) if is_late else error)
            lane.flying.clear()
            lane.sock = None
            lane.doomed = False
            self._changed.notify_all()
        self._settle([frame.job for frame in frames])

    # -- the end ---------------------------------------------------------------------------------

    def withdraw(self, memory: Registered) -> None:
        """Operations on this local region end; when this returns, nothing touches it any more."""
        with self._changed:
            for frame in self._queue:
                self._fail_pieces(frame, memory)
            for lane in self._lanes:
                hit = [self._fail_pieces(frame, memory) for frame in lane.flying]
                if any(hit):
                    lane.doom()
            jobs = list(self._jobs)
        self._settle(jobs)
        with self._changed:
            while any(_touches(frame, memory) for lane in self._lanes for frame in lane.flying):
                self._changed.wait()

    @staticmethod
    def _fail_pieces(frame: Frame, memory: Registered) -> bool:
        hit = [piece for piece in frame.pieces if piece.memory is memory]
        for piece in hit:
            frame.job.fail(piece.item, outside("here", "the local region was taken back"))
        return bool(hit)

    def end(self, error: KVFerryError) -> None:
        """Everything under way fails with this error, at once. Idempotent."""
        with self._changed:
            if self._ended is None:
                self._ended = error
                self._writing = any(job.writing for job in self._jobs)
                # The peer answers this with its own end, once it does not touch its memory for us any more.
                self._control.finish()
                self._watch.add(self._clock() + _CONFIRM_SECONDS, self._control.cut)
            jobs = list(self._jobs)
            for job in jobs:
                job.fail_all(error)
            self._queue.clear()
            for lane in self._lanes:
                lane.doom()
            self._changed.notify_all()
        self._settle(jobs)


def _touches(frame: Frame, memory: Registered) -> bool:
    """Whether the frame is about this local region."""
    return any(piece.memory is memory for piece in frame.pieces)
