"""Discovery and loading of plugins. Enumerating imports nothing; only listed names are imported."""

from kvferry.plugins.discovery import DistributionSource, installed_distributions
from kvferry.plugins.factprobe import ProbedFacts
from kvferry.plugins.loaded import LoadedPlugins, OwnedSpec
from kvferry.plugins.loader import BUILTIN_NAME, load_plugins
from kvferry.plugins.records import PluginRecord, PluginRequest, PluginState, Provided
from kvferry.plugins.resolve import resolve

__all__ = [
    "BUILTIN_NAME",
    "DistributionSource",
    "LoadedPlugins",
    "OwnedSpec",
    "PluginRecord",
    "PluginRequest",
    "PluginState",
    "ProbedFacts",
    "Provided",
    "installed_distributions",
    "load_plugins",
    "resolve",
]
