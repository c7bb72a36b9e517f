"""Drives LMCache's local disk backend, in an environment of its own. Started by :mod:`lmcache_disk`.

Arguments: folder, bytes of a chunk, chunks at once, ``direct`` or ``buffered``. Reads commands ``put FIRST``,
``get FIRST`` and ``remove FIRST`` from standard input, each about that many chunks from the given number on,
and answers each with the seconds it took.

LMCache writes a file and tells that it is stored; here it flushes the file first, which is the only line
that differs from its own ``write_file`` in what it does. Its memory is filled beforehand, and chunks are put
from it and got into it: nothing is copied while the clock runs.
"""

import os
import sys
import threading
import time
from types import MethodType

os.environ.update(LMCACHE_TRACK_USAGE="false", LMCACHE_DISABLE_BANNER="1", LMCACHE_LOG_LEVEL="ERROR")
os.environ.update(DO_NOT_TRACK="1", VLLM_LOGGING_LEVEL="ERROR", PYTHONHASHSEED="0")

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.event_manager import EventManager
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.storage_manager import StorageManager

TOKENS, HEADS, HEAD_SIZE = 256, 4, 64
SECONDS = 300.0


def write_file(backend, buffer, path):
    if backend.use_odirect and len(buffer) % backend.os_disk_bs == 0:
        descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_DIRECT, 0o644)
    else:
        descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
    left = memoryview(buffer).cast("B")
    while left:
        left = left[os.write(descriptor, left) :]
    os.fsync(descriptor)
    os.close(descriptor)


class Disk:
    def __init__(self, folder, chunk_bytes, at_once, direct):
        layers = chunk_bytes // (2 * TOKENS * HEADS * HEAD_SIZE * 2)
        assert layers * 2 * TOKENS * HEADS * HEAD_SIZE * 2 == chunk_bytes
        self.shape = torch.Size([2, layers, TOKENS, HEADS * HEAD_SIZE])
        self.at_once = at_once
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=TOKENS,
            local_cpu=False,
            max_local_cpu_size=chunk_bytes * (at_once * 2 + 8) / 2**30,
            local_disk=folder,
            max_local_disk_size=200.0,
        )
        config.extra_config = {"use_odirect": direct}
        metadata = LMCacheMetadata(
            model_name="bench",
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=torch.bfloat16,
            kv_shape=(layers, 2, TOKENS, HEADS, HEAD_SIZE),
            role="worker",
        )
        self.manager = StorageManager(config, metadata, EventManager())
        self.backend = self.manager.storage_backends["LocalDiskBackend"]
        assert self.backend.use_odirect is direct
        self.backend.write_file = MethodType(write_file, self.backend)
        self.objects = [self.allocate() for _ in range(at_once)]
        for item in self.objects:
            item.tensor.view(torch.int16).random_()

    def allocate(self):
        found = self.manager.allocate(self.shape, torch.bfloat16)
        assert found is not None
        return found

    def keys(self, first):
        numbers = range(first, first + self.at_once)
        return [CacheEngineKey("bench", 1, 0, 0x5EED0000 + number, torch.bfloat16) for number in numbers]

    def stamp(self, item):
        return item.tensor.view(torch.int64).reshape(-1)[:1]

    def put(self, first):
        for number, item in enumerate(self.objects):
            self.stamp(item)[0] = first + number
        left = [self.at_once]
        lock, done = threading.Lock(), threading.Event()

        def stored(_key):
            with lock:
                left[0] -= 1
                if left[0] == 0:
                    done.set()

        began = time.perf_counter()
        self.backend.batched_submit_put_task(self.keys(first), self.objects, on_complete_callback=stored)
        assert done.wait(SECONDS)
        return time.perf_counter() - began

    def get(self, first):
        began = time.perf_counter()
        found = self.backend.batched_get_blocking(self.keys(first))
        seconds = time.perf_counter() - began
        for number, item in enumerate(found):
            assert item is not None
            assert self.stamp(item)[0] == first + number
            item.ref_count_down()
        return seconds

    def remove(self, first):
        began = time.perf_counter()
        for key in self.keys(first):
            assert self.backend.remove(key)
        return time.perf_counter() - began


def main():
    folder, chunk_bytes, at_once, mode = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w", buffering=1)  # what libraries print goes elsewhere
    os.dup2(2, 1)
    disk = Disk(folder, int(chunk_bytes), int(at_once), mode == "direct")
    # Pages of its memory are there before the first measurement.
    spare = [disk.allocate() for _ in range(disk.at_once)]
    for item in spare:
        item.tensor.zero_()
        item.ref_count_down()
    print("ready", file=answers)
    for line in sys.stdin:
        name, first = line.split()
        print({"put": disk.put, "get": disk.get, "remove": disk.remove}[name](int(first)), file=answers)
    os._exit(0)  # its threads have no end of their own


if __name__ == "__main__":
    main()
