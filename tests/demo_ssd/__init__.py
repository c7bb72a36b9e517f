"""The second demo: a cache on an SSD that outlives the engine, and a ``kill -9`` while it writes."""
