"""The ways in which one instance reads from another, as their configurations say them."""

from __future__ import annotations

from attrs import frozen

CHANNELS = ("local", "tcp")
KEYS = "use: p2p, load_deadline: 20s"
"""A machine that is busy with other things has time enough, too: what is shown here is not how it copes."""


@frozen(kw_only=True)
class Mode:
    """``borrower`` and ``holder`` are YAML that the two have beyond what all instances here share, with the
    plugins that the holder needs for it."""

    name: str
    borrower: str
    holder: str = ""
    holder_plugins: tuple[str, ...] = ()


EAGER = Mode(name="eager", borrower=f"p2p: {{{KEYS}}}\n")
DELAYED = Mode(name="delayed", borrower=f"p2p: {{{KEYS}, delay: true, land_on: device}}\n")
STAGED = Mode(
    name="delayed, staged",
    borrower=DELAYED.borrower,
    holder="staging: {use: host, capacity: 256MiB}\n",
    holder_plugins=("host_staging",),
)
MODES = (EAGER, DELAYED, STAGED)
"""Those with one holder's configuration stand together."""


@frozen(kw_only=True)
class Way:
    """A mode over a channel."""

    mode: Mode
    channel: str

    def __str__(self) -> str:
        return f"{self.channel} {self.mode.name}"


def config(way: Way, url: str, *, name: str, lends: bool) -> dict[str, object]:
    """Arguments of :func:`tests.engines.write_config` for the one that ``lends``, or the one that borrows.
    ``url`` is the controller's."""
    mode = way.mode
    staged = mode.holder_plugins if lends else ()
    return {
        "plugins": [f"transport_{way.channel}", "sharing_p2p", *staged],
        "more": f"instance: {name}\n"
        f"channel: {{use: {way.channel}}}\n"
        f"lookup: {{use: controller, url: '{url}'}}\n"
        + (f"{EAGER.borrower}{mode.holder}" if lends else mode.borrower),
    }
