"""Written for a contract that is gone."""

from __future__ import annotations

from kvferry.api import BackendCapabilities, BackendSpec, Manifest, hookimpl

MANIFEST = Manifest(name="zoo_api_old", api="<1.0", rule_prefix="ZOOAPIOLD")


@hookimpl
def kvferry_backends() -> list[BackendSpec]:
    return [
        BackendSpec(
            name="api-old",
            factory="zoo_api_old.backend:Backend",
            options="zoo_api_old.options:Options",
            capabilities=BackendCapabilities(addressable=True),
        )
    ]
