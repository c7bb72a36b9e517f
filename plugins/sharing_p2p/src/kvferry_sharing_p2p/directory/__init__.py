"""The directory says which instance has which chunks, and never has one itself.

State machines without sockets, threads or clocks: times and messages are handed in. ``state`` is the
controller's half, ``publisher`` an instance's, ``messages`` what goes between them.
"""
