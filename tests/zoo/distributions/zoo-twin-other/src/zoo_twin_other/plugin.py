"""Brings the plugin zoo_twin; so does another distribution."""

from __future__ import annotations

from kvferry.api import BackendCapabilities, BackendSpec, Manifest, hookimpl

MANIFEST = Manifest(name="zoo_twin", api=">=1.0,<2", rule_prefix="ZOOTWIN")


@hookimpl
def kvferry_backends() -> list[BackendSpec]:
    return [
        BackendSpec(
            name="twin-of-other",
            factory="zoo_twin_other.backend:Backend",
            options="zoo_twin_other.options:Options",
            capabilities=BackendCapabilities(addressable=True),
        )
    ]
