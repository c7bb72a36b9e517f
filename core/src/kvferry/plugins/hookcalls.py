"""Hook calls, plugin by plugin: a result keeps its owner and a failure stays local."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pluggy

from kvferry.api import PROJECT, KVFerryHooks
from kvferry.compat.guard import Raised, Returned, call_foreign


class _Holder:
    """What pluggy gets to see of a plugin. Not the module itself: pluggy compares and hashes the objects
    that it holds, so that a module which is equal to everything would break its neighbours."""

    def __init__(self, functions: Mapping[str, Callable[..., Any]]) -> None:
        vars(self).update(functions)


class HookCalls:
    """A pluggy manager of its own, with the contract's hooks and no plugin.

    Cold path only. Not thread-safe: one loader uses it.
    """

    def __init__(self) -> None:
        self._manager = pluggy.PluginManager(PROJECT)
        self._manager.add_hookspecs(KVFerryHooks)

    def register(
        self, name: str, functions: Mapping[str, Callable[..., Any]]
    ) -> Returned[str | None] | Raised:
        """All of a plugin's hook functions, by attribute, or none of them."""
        return call_foreign(lambda: self._manager.register(_Holder(functions), name=name))

    def unregister(self, name: str) -> None:
        """Forget the plugin; does nothing when it was never registered."""
        if self._manager.has_plugin(name):
            self._manager.unregister(name=name)

    def call(self, name: str, hook: str, **arguments: Any) -> Returned[tuple[Any, ...]] | Raised:
        """The items that the plugin's implementation of ``hook`` gives, none without one.

        What the hook returns is exhausted here, so a generator that fails half-way fails here too.
        """
        others = [plugin for other, plugin in self._manager.list_name_plugin() if other != name]
        caller = self._manager.subset_hook_caller(hook, remove_plugins=others)
        return call_foreign(lambda: _items(caller(**arguments)))

    def monitor(self, before: Callable[[str], None]) -> Callable[[], None]:
        """Call ``before`` with the hook's name on every hook call; returns how to stop that.

        For tests and debugging: it shows that hot-path work makes no hook call.
        """

        def note(hook_name: str, implementations: object, arguments: Mapping[str, Any]) -> None:
            del implementations, arguments
            before(hook_name)

        def nothing(*_: object) -> None:
            return

        undo: Callable[[], None] = self._manager.add_hookcall_monitoring(note, nothing)
        return undo


def _items(results: list[Any]) -> tuple[Any, ...]:
    items: list[Any] = []
    for result in results:
        if isinstance(result, str | bytes) or not hasattr(type(result), "__iter__"):
            raise TypeError(f"it returned {result!r}, not a list")
        items += result
    return tuple(items)
