"""How a gate says no."""

from __future__ import annotations

from kvferry.plugins.records import PluginState


class Refusal(Exception):
    """A gate refused a plugin. Never leaves the loader: it becomes the plugin's row."""

    def __init__(
        self,
        state: PluginState,
        reason: str,
        remedy: str,
        error: BaseException | None = None,
        *,
        meant: str = "",
    ) -> None:
        super().__init__(reason)
        self.state = state
        self.reason = reason
        self.remedy = remedy
        self.error = error
        self.meant = meant
        """The installed plugin that the name of one that is missing most likely means."""
