"""Nothing is wrong with it."""

from __future__ import annotations

from kvferry.api import BackendCapabilities, BackendSpec, Manifest, hookimpl

MANIFEST = Manifest(
    name="zoo_good", api=">=1.0,<2", rule_prefix="ZOOGOOD", summary="a tier over core's own arena"
)


@hookimpl
def kvferry_backends() -> list[BackendSpec]:
    return [
        BackendSpec(
            name="good",
            factory="zoo_good.backend:Backend",
            options="zoo_good.options:Options",
            capabilities=BackendCapabilities(addressable=True),
        )
    ]
