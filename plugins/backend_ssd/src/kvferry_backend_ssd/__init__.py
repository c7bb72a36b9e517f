"""A folder on an SSD as a persistent tier of kvferry."""

__version__ = "0.1.0"
