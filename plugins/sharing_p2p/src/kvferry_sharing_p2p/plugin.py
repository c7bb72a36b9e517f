"""Entry module: describes, and imports no implementation."""

from __future__ import annotations

from kvferry.api import Manifest

MANIFEST = Manifest(
    name="sharing_p2p",
    api=">=1.0,<2",
    rule_prefix="P2P",
    summary="instances reuse what others have computed",
)
