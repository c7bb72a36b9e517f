"""A bounded arena in host memory between a tier and a channel."""

__version__ = "0.1.0"
