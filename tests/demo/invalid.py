"""One configuration that cannot work, and what the checker says of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.syntax import Syntax

MISTAKEN = """\
plugins: [backend_cpu, connector_vllm]
chunk_token: 256
tiers:
  cpu: {use: cpu, capacity: "16"}
"""
IMPOSSIBLE = """\
plugins: [backend_cpu, connector_vllm]
chunk_tokens: 256
tiers:
  cpu: {use: cpu, capacity: 64TiB}
"""
EXIT_ERRORS = 2


def show_invalid(console: Console, folder: Path) -> list[str]:
    """Write a mistaken file and one that breaks a rule, show both and the checker's words.

    Returns what is wrong with the checker's verdict, if anything.
    """
    found = []
    for name, text, expected in (
        ("mistaken.yaml", MISTAKEN, "did you mean 'chunk_tokens'?"),
        ("impossible.yaml", IMPOSSIBLE, "host.memory_bytes"),
    ):
        (folder / name).write_text(text)
        done = subprocess.run(
            [sys.executable, "-m", "kvferry.cli.main", "check", name],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        console.rule(f"kvferry check {name}", align="left")
        console.print(Syntax(text.rstrip(), "yaml", background_color="default"))
        console.print()
        console.print((done.stdout + done.stderr).strip(), highlight=False, markup=False, soft_wrap=True)
        if done.returncode != EXIT_ERRORS or expected not in done.stdout:
            found.append(f"the checker did not refuse {name} for the expected reason")
    return found
