"""Its entry point names an object, and a falsy one."""

from __future__ import annotations

from kvferry.api import BackendCapabilities, BackendSpec, Manifest, hookimpl

MANIFEST = Manifest(name="zoo_entry_object", api=">=1.0,<2", rule_prefix="ZOOENTRYOBJECT")


@hookimpl
def kvferry_backends() -> list[BackendSpec]:
    return [
        BackendSpec(
            name="entry-object",
            factory="zoo_entry_object.backend:Backend",
            options="zoo_entry_object.options:Options",
            capabilities=BackendCapabilities(addressable=True),
        )
    ]


NOTHING = ()
