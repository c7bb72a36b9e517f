"""Gate 2: a plugin's light entry module is imported, what that cost is told, and a refused one is
forgotten."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Collection
from types import ModuleType

from attrs import frozen

from kvferry.compat.guard import Raised, call_foreign
from kvferry.plugins.discovery import Candidate
from kvferry.plugins.records import PluginState
from kvferry.plugins.refusal import Refusal
from kvferry.plugins.resolve import MODULE_NAME, import_failure

HEAVY_MODULES = ("torch", "torch_npu", "zmq", "redis", "vllm", "numpy", "transformers")
"""Modules that no entry module may import, directly or through others."""
WORK_LIMIT_SECONDS = 0.020
"""Processor time that the import of an entry module may take."""
WAIT_LIMIT_SECONDS = 1.0
"""Time beyond its work that an import may take. Generous, because a busy machine makes everyone wait."""

_OURS = "kvferry"


@frozen(kw_only=True)
class Clocks:
    """What an import is timed with, in seconds: the work of this thread, and the time that passes."""

    work: Callable[[], float] = time.thread_time
    passing: Callable[[], float] = time.perf_counter


@frozen(kw_only=True)
class ImportCost:
    """``work`` and ``waited`` in seconds; ``heavy`` are forbidden modules that were not there before.

    What another plugin, or the engine around, imported earlier is not noticed.
    """

    work: float
    waited: float
    heavy: tuple[str, ...]

    def remarks(self) -> tuple[str, ...]:
        """One sentence for each limit that was passed."""
        found = []
        if self.heavy:
            found.append(
                f"importing its entry module pulls {', '.join(self.heavy)}, which an entry module must "
                "not: report to its author that the import belongs into the implementation"
            )
        if self.work > WORK_LIMIT_SECONDS:
            found.append(
                f"importing its entry module took {_milliseconds(self.work)} of work, and the limit is "
                f"{_milliseconds(WORK_LIMIT_SECONDS)}: report it to its author"
            )
        if self.waited > WAIT_LIMIT_SECONDS:
            found.append(
                f"importing its entry module waited {_milliseconds(self.waited)}, and the limit is "
                f"{_milliseconds(WAIT_LIMIT_SECONDS)}: report it to its author"
            )
        return tuple(found)


@frozen(kw_only=True)
class EntryModule:
    """An imported entry module with its cost."""

    module: ModuleType
    cost: ImportCost


def import_entry_module(candidate: Candidate, clocks: Clocks) -> EntryModule:
    """Import it. Raises :class:`Refusal` when that fails in any way."""
    if MODULE_NAME.fullmatch(candidate.module) is None:
        raise Refusal(
            PluginState.FAILED,
            f"the entry point of {candidate.label} is {candidate.module!r}, and it must be the "
            "name of a module",
            "report it to the plugin's author",
        )
    loaded = {name for name in HEAVY_MODULES if name in sys.modules}
    work, passing = clocks.work(), clocks.passing()
    imported = call_foreign(lambda: importlib.import_module(candidate.module))
    work, passing = clocks.work() - work, clocks.passing() - passing
    if isinstance(imported, Raised):
        reason, remedy = import_failure(imported.error, candidate.module)
        raise Refusal(PluginState.FAILED, f"{candidate.label}: {reason}", remedy, imported.error)
    heavy = tuple(name for name in HEAVY_MODULES if name in sys.modules and name not in loaded)
    return EntryModule(
        module=imported.value,
        cost=ImportCost(work=work, waited=max(0.0, passing - work), heavy=heavy),
    )


def forget_modules(module: str, before: Collection[str]) -> None:
    """Drop what the package of ``module`` newly loaded, ``before`` being the names loaded earlier.

    A refused plugin leaves nothing behind: when it is mended, the same process can load it again.
    """
    package = module.partition(".")[0]
    if package == _OURS:
        return
    for name in [name for name in sys.modules if name not in before]:
        if name == package or name.startswith(f"{package}."):
            dropped = sys.modules.pop(name)
            parent, _, attribute = name.rpartition(".")
            holder = vars(sys.modules[parent]) if parent in sys.modules else {}
            if holder.get(attribute) is dropped:
                del holder[attribute]


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms"
