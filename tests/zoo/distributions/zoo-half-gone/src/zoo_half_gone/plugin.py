"""Its files are deleted after it was installed, and its metadata stays."""

from __future__ import annotations

from kvferry.api import BackendCapabilities, BackendSpec, Manifest, hookimpl

MANIFEST = Manifest(name="zoo_half_gone", api=">=1.0,<2", rule_prefix="ZOOHALFGONE")


@hookimpl
def kvferry_backends() -> list[BackendSpec]:
    return [
        BackendSpec(
            name="half-gone",
            factory="zoo_half_gone.backend:Backend",
            options="zoo_half_gone.options:Options",
            capabilities=BackendCapabilities(addressable=True),
        )
    ]
