"""A module that is false, empty and equal to everything, and no worse for it."""

from __future__ import annotations

import sys
import types

from kvferry.api import BackendCapabilities, BackendSpec, Manifest, hookimpl

MANIFEST = Manifest(name="zoo_falsy", api=">=1.0,<2", rule_prefix="ZOOFALSY")


@hookimpl
def kvferry_backends() -> list[BackendSpec]:
    return [
        BackendSpec(
            name="falsy",
            factory="zoo_falsy.backend:Backend",
            options="zoo_falsy.options:Options",
            capabilities=BackendCapabilities(addressable=True),
        )
    ]


class Falsy(types.ModuleType):
    def __bool__(self) -> bool:
        return False

    def __len__(self) -> int:
        return 0

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


_falsy = Falsy(__name__)
_falsy.__dict__.update(globals())
sys.modules[__name__] = _falsy
