"""A class that cannot be built the way core builds it."""

from __future__ import annotations

from kvferry.api import BackendCapabilities, BackendSpec, Manifest, hookimpl

MANIFEST = Manifest(name="zoo_wrong_constructor", api=">=1.0,<2", rule_prefix="ZOOWRONGCONSTRUCTOR")


@hookimpl
def kvferry_backends() -> list[BackendSpec]:
    return [
        BackendSpec(
            name="wrong-constructor",
            factory="zoo_wrong_constructor.backend:Backend",
            options="zoo_wrong_constructor.options:Options",
            capabilities=BackendCapabilities(addressable=True),
        )
    ]
