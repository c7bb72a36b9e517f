"""The ``connector:`` section for vLLM."""

from __future__ import annotations

import enum

from attrs import field, frozen


class LoadMode(enum.Enum):
    AUTO = "auto"
    ASYNC = "async"
    SYNC = "sync"


@frozen(kw_only=True)
class VLLMConnectorOptions:
    """Options of the vLLM connector."""

    load: LoadMode = field(
        default=LoadMode.AUTO,
        metadata={
            "doc": "async: loads run beside other requests; sync: in front of the forward pass; auto: in "
            "front of it when nothing else runs and the load is short, else beside"
        },
    )
    save_generated: bool = field(
        default=True, metadata={"doc": "also keep the KV cache of generated tokens, for the next turn"}
    )
    verify: bool = field(
        default=False,
        metadata={"doc": "digest every block when it is stored and after it is restored, and compare"},
    )
