"""Installed by an operator with pip install -e."""

from __future__ import annotations

from kvferry.api import BackendCapabilities, BackendSpec, Manifest, hookimpl

MANIFEST = Manifest(
    name="zoo_editable", api=">=1.0,<2", rule_prefix="ZOOEDITABLE", summary="a tier in the making"
)


@hookimpl
def kvferry_backends() -> list[BackendSpec]:
    return [
        BackendSpec(
            name="editable",
            factory="zoo_editable.backend:Backend",
            options="zoo_editable.options:Options",
            capabilities=BackendCapabilities(addressable=True),
        )
    ]
