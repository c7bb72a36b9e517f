"""Drives another project's transfer engine, in an environment of its own. Started by :mod:`transfer_engines`.

Arguments: ``nixl`` or ``mooncake``, bytes of the memory, bytes of a span, and for the side that moves them
what the other side has told. That side fills its memory, tells in one line of JSON how it is reached, and
waits for the end of its standard input. The one that moves tells ``ready``, then reads commands ``read`` and
``write`` from standard input, moves all spans in an order that is the same every time, and answers each with
the seconds it took.

What can be prepared beforehand is: the spans are described, and NIXL's transfers made, before the clock runs.
"""

import json
import os
import sys
import time

import numpy as np

FAR_BYTE, NEAR_BYTE = 3, 1


class Nixl:
    """Its UCX backend, on ordinary memory."""

    def __init__(self, side, memory):
        from nixl._api import nixl_agent, nixl_agent_config

        self.memory = memory
        self.agent = nixl_agent(side, nixl_agent_config(backends=["UCX"]))
        self.agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")

    def told(self):
        return {"metadata": self.agent.get_agent_metadata().hex(), "address": self.memory.ctypes.data}

    def meet(self, told, spans):
        peer = self.agent.add_remote_agent(bytes.fromhex(told["metadata"]))
        ours = self.agent.get_xfer_descs([(here, size, 0) for here, _, size in spans], "DRAM")
        theirs = self.agent.get_xfer_descs([(there, size, 0) for _, there, size in spans], "DRAM")
        self.transfers = {
            verb: self.agent.initialize_xfer(verb.upper(), ours, theirs, peer) for verb in ("read", "write")
        }

    def move(self, verb):
        transfer = self.transfers[verb]
        state = self.agent.transfer(transfer)
        while state == "PROC":
            state = self.agent.check_xfer_state(transfer)
        assert state == "DONE", state


class Mooncake:
    """Its TCP transport, without a metadata server."""

    def __init__(self, side, memory):
        from mooncake.engine import TransferEngine

        self.memory = memory
        self.engine = TransferEngine()
        assert self.engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
        assert self.engine.register_memory(memory.ctypes.data, memory.nbytes) == 0

    def told(self):
        return {"name": f"127.0.0.1:{self.engine.get_rpc_port()}", "address": self.memory.ctypes.data}

    def meet(self, told, spans):
        self.peer = told["name"]
        self.columns = [list(column) for column in zip(*spans, strict=True)]

    def move(self, verb):
        engine = self.engine
        call = engine.batch_transfer_sync_read if verb == "read" else engine.batch_transfer_sync_write
        assert call(self.peer, *self.columns) == 0


def serve(engine, memory, span, told, answers):
    count = memory.nbytes // span
    order = np.random.default_rng(5).permutation(count).tolist()
    here, there = memory.ctypes.data, told["address"]
    engine.meet(told, [(here + at * span, there + place * span, span) for at, place in enumerate(order)])
    engine.move("read")
    assert (memory == FAR_BYTE).all(), "what was read is not what is there"
    print("ready", file=answers)
    for line in sys.stdin:
        began = time.perf_counter()
        engine.move(line.strip())
        print(time.perf_counter() - began, file=answers)


def main():
    name, total, span, *told = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w", buffering=1)  # what libraries print goes elsewhere
    os.dup2(2, 1)
    memory = np.full(int(total), NEAR_BYTE if told else FAR_BYTE, np.uint8)
    engine = {"nixl": Nixl, "mooncake": Mooncake}[name]("near" if told else "far", memory)
    if told:
        serve(engine, memory, int(span), json.loads(told[0]), answers)
    else:
        print(json.dumps(engine.told()), file=answers)
        sys.stdin.read()
    os._exit(0)  # their threads have no end of their own, and NIXL's libraries crash at the usual one


if __name__ == "__main__":
    main()
