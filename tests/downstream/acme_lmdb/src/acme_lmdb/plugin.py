"""Entry module: describes, and imports no implementation."""

from kvferry.api import BackendCapabilities, BackendSpec, Manifest, hookimpl

MANIFEST = Manifest(
    name="acme_lmdb",
    api=">=1.0,<2",
    rule_prefix="ACME",
    summary="LMDB as a tier",
)


@hookimpl
def kvferry_backends():
    return [
        BackendSpec(
            name="lmdb",
            factory="acme_lmdb.backend:LmdbBackend",
            options="acme_lmdb.options:LmdbOptions",
            capabilities=BackendCapabilities(
                persistent=True,
                needs_host_buffer=True,
                max_value_bytes=1 << 20,
            ),
            summary="chunks in an LMDB environment on a local disk",
        )
    ]
