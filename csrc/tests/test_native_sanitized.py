"""The C interface compiled with sanitizers and run without Python around it."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parents[1]


def build(folder: Path, sanitizers: str) -> Path:
    """Compile the driver, or skip where there is no compiler or no run-time library for it."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler on this machine")
    flags = [f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all", "-std=c++17", "-O1", "-g", "-pthread"]
    empty = folder / "empty.cpp"
    empty.write_text("int main() { return 0; }\n")
    trial = [compiler, *flags, str(empty), "-o", str(folder / "empty")]
    if subprocess.run(trial, capture_output=True, check=False).returncode != 0:
        pytest.skip(f"{compiler} has no library for -fsanitize={sanitizers}")
    program = folder / "driver"
    sources = [*CSRC.glob("tests/driver*.cpp"), *CSRC.glob("src/*.cpp")]
    command = [compiler, *flags, "-I", str(CSRC / "include"), *map(str, sources), "-ldl", "-o", str(program)]
    subprocess.run(command, check=True)
    return program


@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_the_c_interface_is_clean_under_sanitizers(tmp_path: Path, sanitizers: str) -> None:
    program = build(tmp_path, sanitizers)
    command = [str(program)]
    if sanitizers == "thread" and shutil.which("setarch"):
        # Older run-time libraries cannot place their shadow memory under strong address randomisation.
        command = ["setarch", platform.machine(), "--addr-no-randomize", *command]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
