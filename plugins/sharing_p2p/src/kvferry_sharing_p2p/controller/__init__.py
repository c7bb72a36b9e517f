"""``kvferry controller``: a directory behind a socket, with its page of status."""
