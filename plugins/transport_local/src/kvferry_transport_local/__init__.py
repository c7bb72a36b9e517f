"""A channel between processes of one host: memory files are mapped, other memory is read across processes.

Who may copy, and when it counts
--------------------------------
A **read** is done by whoever asked for it: its threads copy from the peer's memory into its own, and the
peer runs nothing for it. The copy may be torn, because the peer may take the memory back at any moment. So
each channel has a small page that its peers can only read. It holds one word per region, which the owner
raises when it takes the region back, and one for the channel as a whole, raised when it closes. The reader
looks at the word in front of the copy and again behind it, then at the peer's life, then at its own
deadline. Only if nothing has changed is the operation done. Looking at the peer's life *behind* the copy
also makes sure that its process number was not given to another process meanwhile.

A **write** is done by the owner of the memory. A writer that copied by itself could be stopped
(``SIGSTOP``) between its last look at a lease and the copy, and go on a minute later, when the memory
holds something else; no check of the writer's can close that gap. So the writer names its span in a frame,
and a thread of the owner compares it with the owner's own table, looks at the deadline, and copies from
the writer's memory by the same two ways as a read, in pieces. When the owner takes a region back, it waits
for the pieces that are under way, and none begins after that.

Deadlines travel as times of the system's monotonic clock, which all processes of a host share, so a frame
that lay in a stopped process for long is not taken for a new one.
"""

__version__ = "0.1.0"
