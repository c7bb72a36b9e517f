"""Proof that an entry module is light: what its import pulls in, seen in a fresh interpreter."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence

from attrs import frozen

from kvferry.plugins.entrymodule import HEAVY_MODULES

LIGHT_SHARE = 0.2

_PROBE = """
import json, sys, time
began = time.process_time()
import kvferry.api, kvferry.plugins
loader = time.process_time() - began
before = set(sys.modules)
began = time.process_time()
__import__({module!r})
own = time.process_time() - began
new = sorted(set(sys.modules) - before)
heavy = [name for name in {heavy!r} if name in sys.modules]
print(json.dumps(dict(loader=loader, own=own, new=new, heavy=heavy)))
"""


@frozen(kw_only=True)
class ImportCost:
    """What importing one module costs beyond the contract and the loader.

    ``seconds`` and ``loader_seconds`` are processor time, the least of the runs: of the module
    alone, and of ``kvferry.api`` with the loader, which are there before any plugin. ``modules`` are
    those it newly loaded, ``heavy`` the forbidden ones among all that are loaded.
    """

    module: str
    seconds: float
    loader_seconds: float
    modules: tuple[str, ...]
    heavy: tuple[str, ...]

    @property
    def light(self) -> bool:
        """Nothing heavy is loaded and the time is small beside the loader's own.

        The share stands for 20 ms on a machine where the loader takes 100; a fixed time would judge
        the machine and not the module.
        """
        return not self.heavy and self.seconds <= LIGHT_SHARE * self.loader_seconds


def measure_import(
    module: str, *, heavy: Sequence[str] = HEAVY_MODULES, runs: int = 1, path: Sequence[str] = ()
) -> ImportCost:
    """Import ``module`` in a fresh interpreter, ``runs`` times.

    ``path`` is put in front of the import path. Raises ``RuntimeError`` with the child's error
    output when the import fails.
    """
    code = f"import sys; sys.path[:0] = {list(path)!r}\n"
    code += _PROBE.format(module=module, heavy=list(heavy))
    results = []
    for _ in range(runs):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
        )
        if done.returncode != 0:
            raise RuntimeError(f"importing {module} failed:\n{done.stderr}")
        results.append(json.loads(done.stdout))
    return ImportCost(
        module=module,
        seconds=min(result["own"] for result in results),
        loader_seconds=min(result["loader"] for result in results),
        modules=tuple(results[0]["new"]),
        heavy=tuple(results[0]["heavy"]),
    )
