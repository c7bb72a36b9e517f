"""Typed configuration: one YAML file, the environment and the engine's overrides.

:func:`read_core` reads everything that core understands and says which plugins are wanted;
:meth:`RawConfig.structure` finishes the work once their options classes are known. Every value
remembers its origin, and all faults of a run are reported together.
"""

from kvferry.api.units import (
    ByteSize,
    Duration,
    format_duration,
    format_size,
    parse_duration,
    parse_size,
)
from kvferry.config.fields import not_blank, positive
from kvferry.config.leaves import Leaf
from kvferry.config.nodes import ConfigPath
from kvferry.config.reading import RawConfig, read_core
from kvferry.config.schema import (
    DEFAULT_INSTANCE,
    Channel,
    Config,
    Connector,
    Eviction,
    LandOn,
    Lookup,
    OnError,
    PluginEntry,
    Staging,
    StoreWhen,
    Tier,
)
from kvferry.config.sections import OwnKeys, Resolver, Selection
from kvferry.config.show import config_data, config_text
from kvferry.config.sources import ConfigSources, find_config

__all__ = [
    "DEFAULT_INSTANCE",
    "ByteSize",
    "Channel",
    "Config",
    "ConfigPath",
    "ConfigSources",
    "Connector",
    "Duration",
    "Eviction",
    "LandOn",
    "Leaf",
    "Lookup",
    "OnError",
    "OwnKeys",
    "PluginEntry",
    "RawConfig",
    "Resolver",
    "Selection",
    "Staging",
    "StoreWhen",
    "Tier",
    "config_data",
    "config_text",
    "find_config",
    "format_duration",
    "format_size",
    "not_blank",
    "parse_duration",
    "parse_size",
    "positive",
    "read_core",
]
