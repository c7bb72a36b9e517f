"""For every suite of the repository."""

from hypothesis import settings

# Time per example says something about the machine, nothing about the code.
settings.register_profile("kvferry", settings.default, deadline=None)
settings.load_profile("kvferry")
