"""A hook that no caller will ever find."""

from __future__ import annotations

from kvferry.api import BackendCapabilities, BackendSpec, Manifest, hookimpl

MANIFEST = Manifest(name="zoo_misspelt_hook", api=">=1.0,<2", rule_prefix="ZOOMISSPELTHOOK")


@hookimpl
def kvferry_backend() -> list[BackendSpec]:
    return [
        BackendSpec(
            name="misspelt-hook",
            factory="zoo_misspelt_hook.backend:Backend",
            options="zoo_misspelt_hook.options:Options",
            capabilities=BackendCapabilities(addressable=True),
        )
    ]
