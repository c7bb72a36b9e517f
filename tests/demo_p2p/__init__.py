"""The third demo: one engine answers from the memory of another."""
