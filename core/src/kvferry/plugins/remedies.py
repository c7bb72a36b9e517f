"""What to do about a bad plugin, for whoever wrote it and for whoever only uses it."""

from __future__ import annotations

UPGRADE = "upgrade the plugin, or report it to its author"


def mend(fix: str) -> str:
    """``fix`` is what the author does about it; it comes first, and then what anybody else can do."""
    return f"{fix}; if the plugin is not yours, {UPGRADE}"
