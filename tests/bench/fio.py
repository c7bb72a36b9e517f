"""fio as the baseline of what a disk gives: command lines, and what they measured."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

from attrs import frozen


def fio_missing() -> str:
    """Why there is no baseline here; empty when there is one."""
    if shutil.which("fio") is None:
        return "fio is not installed (Debian: apt-get install fio)"
    return ""


@frozen(kw_only=True)
class FioJob:
    """``total`` bytes in blocks of ``block``, ``depth`` of them under way at once, past the page cache.

    Writes go over bytes that are there already and end in a flush whose time counts; with ``durable``, each
    is durable by itself before it counts as written.
    """

    write: bool
    block: int
    depth: int
    total: int
    durable: bool = False

    def command(self, file: Path | str) -> list[str]:
        command = [
            "fio",
            "--name=baseline",
            f"--filename={file}",
            f"--rw={'write' if self.write else 'read'}",
            f"--bs={self.block >> 10}k",
            f"--size={self.total >> 20}m",
            f"--iodepth={self.depth}",
            "--ioengine=io_uring",
            "--direct=1",
            "--output-format=json",
        ]
        if self.write:
            command += ["--overwrite=1", "--end_fsync=1"]
        if self.durable:
            command.append("--sync=dsync")
        return command

    def run(self, file: Path) -> float:
        """Seconds that it took."""
        done = subprocess.run(self.command(file), capture_output=True, text=True, check=False, timeout=600)
        if done.returncode != 0:
            raise RuntimeError(f"fio failed: {done.stderr.strip() or done.stdout[-500:]}")
        # Before the report there may be notes for people.
        job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
        moved = job["write" if self.write else "read"]
        if moved["io_bytes"] != self.total:
            raise RuntimeError(f"fio moved {moved['io_bytes']} bytes of {self.total}")
        return float(moved["runtime"]) / 1e3
