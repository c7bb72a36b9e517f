"""Eviction policies of kvferry."""

__version__ = "0.1.0"
