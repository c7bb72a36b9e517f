"""A channel of kvferry over Unix sockets."""
