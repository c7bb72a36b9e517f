"""Written for a contract that is yet to come."""

from __future__ import annotations

from kvferry.api import BackendCapabilities, BackendSpec, Manifest, hookimpl

MANIFEST = Manifest(name="zoo_api_new", api=">=2.0", rule_prefix="ZOOAPINEW")


@hookimpl
def kvferry_backends() -> list[BackendSpec]:
    return [
        BackendSpec(
            name="api-new",
            factory="zoo_api_new.backend:Backend",
            options="zoo_api_new.options:Options",
            capabilities=BackendCapabilities(addressable=True),
        )
    ]
