"""Printed when the engine could not be installed."""

print(
    """
The engine could not be installed. If pip said that it finds no torch==2.13.0+cpu, it does not know PyTorch's
index of CPU wheels. Name that index beside your own and call make again:

    export PIP_EXTRA_INDEX_URL=<the index that PyTorch's installation page shows for Linux, pip and CPU>
"""
)
