"""A channel of kvferry over TCP, which reaches any host."""

__version__ = "0.1.0"
