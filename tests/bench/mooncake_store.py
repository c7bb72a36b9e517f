"""A real vLLM with Mooncake Store, whose memory is a process of its own, for a comparison in the same run."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from tests.bench.environments import PackageMissing, kept_environment, packages_of
from tests.bench.transfer_engines import MOONCAKE
from tests.engines import Engine, EngineError, engine_arguments, engine_environment
from tests.models import DEMO, make_model

KV_TRANSFER = {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both"}
START_SECONDS = 30.0
END_SECONDS = 10.0
MEMORY = "2 GB"
BUFFER = "512MB"


@contextmanager
def mooncake_engine(cache: Path, folder: Path) -> Iterator[Engine]:
    """Mooncake's master, the client that has the memory, and an engine that stores in it over TCP; logs and
    models lie in ``folder``. Raises :class:`PackageMissing` when one of them does not come up.

    The client's transfer port listens at all addresses, whatever it is told.
    """
    python = kept_environment(cache, MOONCAKE.name, MOONCAKE.installs, MOONCAKE.check)
    packages = packages_of(python)
    master, metrics, store = _free_ports(3)
    with ExitStack() as stack:
        log = stack.enter_context((folder / "mooncake.log").open("w"))
        libraries = str(packages / "mooncake")
        _started(
            stack,
            [
                str(packages / "mooncake" / "mooncake_master"),
                *("--rpc_address=127.0.0.1", f"--rpc_port={master}"),
                *("--metrics_host=127.0.0.1", f"--metrics_port={metrics}"),
            ],
            libraries,
            log,
        )
        _wait_for(master, "mooncake_master")
        _started(
            stack,
            [
                str(packages / "mooncake" / "mooncake_client"),
                *("--host=127.0.0.1", "--metadata_server=P2PHANDSHAKE", "--protocol=tcp"),
                *(f"--master_server_address=127.0.0.1:{master}", f"--global_segment_size={MEMORY}"),
                f"--port={store}",
            ],
            libraries,
            log,
        )
        _wait_for(store, "mooncake_client")
        config = folder / "mooncake.json"
        config.write_text(json.dumps(_config(master)))
        variables = engine_environment(
            **MOONCAKE.variables,
            MOONCAKE_CONFIG_PATH=str(config),
            MOONCAKE_REQUESTER_LOCAL_HOSTNAME="127.0.0.1",
            VLLM_HOST_IP="127.0.0.1",
            PYTHONPATH=os.pathsep.join([str(packages), *_python_path()]),
            LD_LIBRARY_PATH=libraries,
        )
        engine = Engine(
            engine_arguments(make_model(folder, DEMO), kv_transfer_config=KV_TRANSFER),
            variables,
            folder / "engine-mooncake.log",
        )
        try:
            stack.enter_context(engine)
        except EngineError as error:
            raise PackageMissing(f"vLLM does not start with it: {error}") from error
        yield engine


def _config(master: int) -> dict[str, object]:
    return {
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": f"127.0.0.1:{master}",
        "protocol": "tcp",
        "device_name": "",
        "mode": "standalone-store",
        "global_segment_size": 0,
        "local_buffer_size": BUFFER,
    }


def _python_path() -> list[str]:
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


def _started(stack: ExitStack, command: list[str], libraries: str, log: IO[str]) -> None:
    """A process that ends with the stack."""
    variables = {**os.environ, **MOONCAKE.variables, "LD_LIBRARY_PATH": libraries}
    try:
        process = subprocess.Popen(command, env=variables, stdout=log, stderr=subprocess.STDOUT)
    except OSError as error:
        raise PackageMissing(f"{command[0]}: {error}") from error
    stack.callback(_end, process)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _wait_for(port: int, name: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), 1.0).close()
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise PackageMissing(f"{name} does not listen after {START_SECONDS:g} s")


def _free_ports(count: int) -> list[int]:
    """Free now; the programs take none by themselves."""
    with ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [server.getsockname()[1] for server in servers]
