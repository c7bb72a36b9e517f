"""Called by vLLM in every one of its processes."""

from __future__ import annotations

NAME = "KVFerryConnector"


def register() -> None:
    """Make ``KVFerryConnector`` a name that vLLM knows. Safe to call again."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        KVConnectorFactory.get_connector_class_by_name(NAME)
    except ValueError:
        KVConnectorFactory.register_connector(NAME, "kvferry_connector_vllm.connector", NAME)
