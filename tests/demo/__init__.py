"""The demo: a real vLLM reuses its KV cache from a CPU tier, and gives the same answers."""
