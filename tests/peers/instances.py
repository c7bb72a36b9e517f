"""Instances in processes, and proxies in front of what they listen at."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from attrs import define, field

from kvferry.testing.fake_instance import wait_until
from kvferry.testing.tcp_proxy import TCPProxy

CHUNK = 16
CHUNKS = 4
LONG = 30.0
"""Nothing takes so long unless it hangs."""
PIECE = 64
LOAD, LEASE, GUARD, PAUSE = 1.0, 1.5, 0.3, 0.3
CONFIG = """\
plugins: [backend_cpu, transport_{channel}, sharing_p2p]
instance: {name}
chunk_tokens: {chunk}
runtime_dir: {folder}
tiers: {{cpu: {{use: cpu, capacity: {capacity}}}}}
channel: {{use: {channel}{channel_more}}}
lookup: {{use: controller, url: "{url}"}}
p2p:
  use: p2p
  load_deadline: {load}s
  lease: {lease}s
  guard: {guard}s
  pause: {pause}s
  max_lent: 0.9
{p2p_more}"""


def prompt(number: int) -> list[int]:
    """Four chunks and a token that is left to compute."""
    return [1000 * number + token for token in range(CHUNKS * CHUNK + 1)]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@define(eq=False)
class Instance:
    """One process."""

    name: str
    process: subprocess.Popen[bytes]
    killed: bool = False
    _heard: bytes = b""

    def ask(self, do: str, **more: Any) -> Any:
        """Have it do something, and wait for the answer."""
        self.tell(do, **more)
        return self.answer()

    def tell(self, do: str, **more: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **more}).encode() + b"\n")
        self.process.stdin.flush()

    def answer(self, seconds: float = LONG) -> Any:
        """To what was told first and is not answered yet."""
        assert self.process.stdout is not None
        end = time.monotonic() + seconds
        while b"\n" not in self._heard:
            ready = select.select([self.process.stdout], [], [], max(0.0, end - time.monotonic()))[0]
            assert ready, f"{self.name} hangs"
            more = os.read(self.process.stdout.fileno(), 1 << 16)
            assert more, f"{self.name} ended with {self.process.wait(LONG)}"
            self._heard += more
        line, self._heard = self._heard.split(b"\n", 1)
        return json.loads(line)

    def serve(self, *numbers: int) -> list[list[int]]:
        """What requests for these prompts hit, in tokens."""
        hits: list[list[int]] = self.ask("serve", prompts=[prompt(number) for number in numbers])["hits"]
        return hits

    def state(self) -> dict[str, Any]:
        told: dict[str, Any] = self.ask("state")
        return told

    def settle(self) -> dict[str, Any]:
        """Wait until it holds and lends nothing, and nothing is on its way."""
        told: dict[str, Any] = {}

        def settled() -> bool:
            told.update(self.state())
            return bool(told["rest"]) and not told["held"] + told["leases"] + told["lent"]

        wait_until(settled, LONG, f"{self.name} keeps something: {told}")
        return told

    def kill(self) -> None:
        self.killed = True
        self.process.kill()
        self.process.wait(LONG)

    def stop(self) -> None:
        """Have it stand still; it does when this returns."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        """In good order, unless it was killed."""
        if self.process.poll() is None:
            self.go_on()
        try:
            self.process.communicate(timeout=LONG)
        except (subprocess.TimeoutExpired, ValueError):
            self.process.kill()
            self.process.wait(LONG)
        assert self.killed or self.process.returncode == 0, f"{self.name}: {self.process.returncode}"


@contextmanager
def controller(port: int = 0) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """One in a process, at a port of loopback; its URL. It may be killed meanwhile."""
    command = [sys.executable, "-m", "kvferry.cli.main", "controller", "--http", "127.0.0.1:0"]
    command += ["--heartbeat", "0.5s", "--limit", "3s"]
    with subprocess.Popen(
        [*command, "--listen", f"tcp://127.0.0.1:{port}"], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline().decode()
            assert "ready at" in line, f"the controller did not start: {line!r}"
            yield line.split("ready at ")[1].split(",")[0], process
        finally:
            process.terminate()
            process.wait(LONG)


@define(eq=False)
class Instances:
    """Starts them, each over the channel of this name, with the controller at ``url``."""

    folder: Path
    stack: ExitStack
    channel: str
    url: str
    controller: int = 0
    """The number of its process."""
    started: int = 0
    _proxies: dict[tuple[str, str], TCPProxy] = field(factory=dict)

    def start(
        self,
        name: str,
        *,
        ports: dict[str, int] | None = None,
        url: str = "",
        capacity: str = "64KiB",
        chunk: int = CHUNK,
        lease: float = LEASE,
        load: float = LOAD,
    ) -> Instance:
        """``ports``: where it listens for ``channel`` and ``p2p``; peers are sent to proxies before those."""
        self.started += 1
        channel_more = p2p_more = ""
        if ports is not None:
            for what, port in ports.items():
                if (name, what) not in self._proxies:
                    proxy = TCPProxy(("127.0.0.1", port))
                    # Small enough to stop in the middle of what is read.
                    proxy.from_target.piece_bytes = PIECE
                    self._proxies[name, what] = self.stack.enter_context(proxy)
        if ports is not None and "channel" in ports:
            told = self.proxy(name, "channel").address[1]
            channel_more = (
                f', listen: ["127.0.0.1:{ports["channel"]}"], advertise: ["127.0.0.1:{told}"], connections: 1'
            )
        if ports is not None and "p2p" in ports:
            told = self.proxy(name, "p2p").address[1]
            p2p_more = f'  listen: "tcp://127.0.0.1:{ports["p2p"]}"\n  advertise: "tcp://127.0.0.1:{told}"\n'
        file = self.folder / f"{name}-{self.started}.yaml"
        file.write_text(
            CONFIG.format(
                channel=self.channel,
                name=name,
                folder=self.folder,
                url=url or self.url,
                capacity=capacity,
                channel_more=channel_more,
                p2p_more=p2p_more,
                chunk=chunk,
                lease=lease,
                load=load,
                guard=GUARD,
                pause=PAUSE,
            )
        )
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.peers.instance_program", str(file), f"{name}-{self.started}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        instance = Instance(name, process)
        self.stack.callback(instance.end)
        instance.answer()
        return instance

    def proxy(self, name: str, what: str) -> TCPProxy:
        return self._proxies[name, what]

    def until_hit(self, near: Instance, number: int) -> None:
        """Until ``near`` loads the whole prompt from somebody: the directory is told in batches."""

        def hit() -> bool:
            near.ask("forget")
            return near.serve(number) == [[CHUNKS * CHUNK]]

        wait_until(hit, LONG, f"{near.name} never hit prompt {number}")


def ports() -> dict[str, int]:
    """Ports that are free now."""
    return {"channel": free_port(), "p2p": free_port()}


Address = tuple[str, int] | str


def listening(pids: Sequence[int]) -> list[tuple[int, int, Address]]:
    """Family, type and address of every socket at which these processes listen."""
    found: list[tuple[int, int, Address]] = []
    for pid in pids:
        inodes = set()
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = os.readlink(link)
            except OSError:
                continue
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
        for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
            columns = line.split()
            if columns[3] == "0A" and columns[9] in inodes:
                port = int(columns[1].split(":")[1], 16)
                found.append((socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", port)))
        for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]:
            columns = line.split()
            # __SO_ACCEPTCON: it listens.
            if int(columns[3], 16) & 0x10000 and columns[6] in inodes and len(columns) > 7:
                found.append((socket.AF_UNIX, int(columns[4], 16), columns[7].replace("@", "\0", 1)))
    return found
