"""Keys of a tier whose eviction policy is ``isolated_lru``."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import field, frozen

from kvferry.api import ByteLimit


@frozen(kw_only=True)
class IsolatedLRUOptions:
    """How much each owner, which is a cache salt, may hold in the tier of one worker."""

    default: ByteLimit = field(
        metadata={
            "doc": "what each cache salt may hold that quotas does not name, requests without a salt "
            "among them: a size such as 1GiB, unlimited, or 0B to keep nothing of theirs"
        }
    )
    quotas: Mapping[str, ByteLimit] = field(
        factory=dict,
        metadata={"doc": "what single cache salts may hold, such as {tenant-a: 4GiB}"},
    )
