"""What a caller sees when the way to a peer is slow or loses something."""

import ctypes
import os

from acme_socket.channel import SocketChannel
from acme_socket.options import SocketOptions

from kvferry.api import ChannelContext, ErrorKind, Region, RemoteOp, Span, TransferStatus
from kvferry.testing.faults import Drop, Fault, FaultPlan, Stall
from kvferry.testing.faulty_channel import FaultyChannel

PLAN = FaultPlan([Fault("read", Stall(), nth=1), Fault("read", Drop(), nth=2)])


def test_a_slow_and_a_lossy_way():
    memory = ctypes.create_string_buffer(b"kv" * 50, 100)
    region = Region(name="m", address=ctypes.addressof(memory), length=100, keep_alive=memory)
    near = FaultyChannel(SocketChannel(SocketOptions()), PLAN)
    far = SocketChannel(SocketOptions())
    context = ChannelContext(name="road", instance="near", epoch=os.urandom(16))
    with PLAN.told():
        near.open(context)
        far.open(ChannelContext(name="road", instance="far", epoch=os.urandom(16)))
        near.register(region)
        far.register(region)
        deadline = context.clock() + 10
        way = near.connect(far.export(), deadline)
        operation = RemoteOp(Span("m", 0, 10), "m", 50)
        slow, lost = (near.read(way, [operation], deadline) for _ in range(2))
        assert not slow.wait(0.1)
        near.release()
        assert slow.wait(10)
        assert slow.results[0].status is TransferStatus.DONE
        near.poll(deadline)
        assert lost.results[0].error.kind is ErrorKind.TIMEOUT
        near.close(deadline)
        far.close(deadline)
