"""kvferry stores and moves the KV cache of LLM serving engines."""

__version__ = "0.1.0"
