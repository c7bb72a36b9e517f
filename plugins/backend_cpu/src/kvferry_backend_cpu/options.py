"""Keys of a tier that uses the CPU backend."""

from __future__ import annotations

from attrs import field, frozen

from kvferry.api import HugePages


@frozen(kw_only=True)
class CPUOptions:
    """Own keys in the tier's section; the capacity is core's."""

    huge_pages: HugePages = field(
        default=HugePages.AUTO,
        metadata={
            "doc": "auto: huge pages where the kernel gives them; require: refuse to start without them; "
            "never: do without"
        },
    )
