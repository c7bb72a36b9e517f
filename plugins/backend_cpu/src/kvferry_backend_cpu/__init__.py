"""CPU memory as a tier of kvferry."""

__version__ = "0.1.0"
