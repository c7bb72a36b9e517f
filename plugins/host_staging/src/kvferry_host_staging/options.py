"""Keys of a staging in host memory."""

from __future__ import annotations

from attrs import Attribute, field, frozen

from kvferry.api import HugePages

MOST_THREADS = 64


class _Unusable(ValueError):
    """What a validator says of a value; the report shows ``remedy`` as its fix."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(what)
        self.remedy = remedy


def _threads(_self: object, _attribute: Attribute[int], value: int) -> None:
    if value < 1:
        raise _Unusable("is below 1", "write 1 or more, or remove the key")
    if value > MOST_THREADS:
        raise _Unusable(f"is above {MOST_THREADS}", f"write {MOST_THREADS} or less, or remove the key")


@frozen(kw_only=True)
class HostStagingOptions:
    """Keys of the section ``staging:`` beside core's."""

    threads: int = field(
        default=4,
        validator=_threads,
        metadata={"doc": "how many threads copy at once, where kvferry-native is installed"},
    )
    huge_pages: HugePages = field(
        default=HugePages.AUTO,
        metadata={
            "doc": "auto: huge pages where the kernel gives them; require: refuse to start without them; "
            "never: do without"
        },
    )
