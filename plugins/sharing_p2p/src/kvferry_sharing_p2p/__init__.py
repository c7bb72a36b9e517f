"""Instances reuse what others have computed."""

__version__ = "0.1.0"
