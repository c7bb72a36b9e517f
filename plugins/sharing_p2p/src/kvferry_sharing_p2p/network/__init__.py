"""How the directory is reached: addresses, the shared secret, sockets, and the client of an instance."""
