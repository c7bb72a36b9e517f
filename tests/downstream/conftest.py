"""The author's own tests run in the author's environment, not in ours."""

collect_ignore = ["acme_lmdb", "acme_socket"]
