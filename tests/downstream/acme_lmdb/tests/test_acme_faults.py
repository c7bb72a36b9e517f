"""What a caller sees when this backend, or the way to it, fails."""

import ctypes

from acme_lmdb.backend import LmdbBackend
from acme_lmdb.options import LmdbOptions

from kvferry.api import BackendContext, ChunkHeader, ChunkKey, Region, Span, WriteStatus
from kvferry.testing.backends import NullArena
from kvferry.testing.faults import Fail, Fault, FaultPlan, NoSpace, Stall
from kvferry.testing.faulty_backend import FaultyBackend

PLAN = FaultPlan(
    [
        Fault("write", NoSpace(), nth=1),
        Fault("write", Fail(), nth=2),
        Fault("write", Stall(), nth=3),
    ]
)


def test_a_failing_way_to_the_store(tmp_path):
    backend = FaultyBackend(LmdbBackend(LmdbOptions(path=str(tmp_path)), 1 << 20), PLAN)
    memory = ctypes.create_string_buffer(b"kv" * 50, 100)
    region = Region(name="m", address=ctypes.addressof(memory), length=100, keep_alive=memory)
    context = BackendContext(name="far", rank=0, make_arena=lambda *_: NullArena(), regions={"m": region})
    key = ChunkKey(bytes(32), bytes(32))
    header = ChunkHeader(key=key, parent=None, depth=0, tokens=16, size=100)
    with PLAN.told():
        backend.open(context)
        deadline = context.clock() + 10
        tickets = [backend.write([(header, Span("m", 0, 100))], deadline) for _ in range(3)]
        assert tickets[0].results[0].status is WriteStatus.NO_SPACE
        assert tickets[1].results[0].status is WriteStatus.FAILED
        assert not tickets[2].wait(0.1)
        backend.close(deadline)
        assert tickets[2].results[0].status is WriteStatus.STORED
