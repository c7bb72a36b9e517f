"""LMDB as a tier of kvferry."""
