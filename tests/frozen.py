"""What the fork server imports last: its objects so far are no business of the collections of garbage in its processes.

A collection would write to every one of them, and so copy the memory that processes share with the server.
"""

import gc

gc.collect()
gc.freeze()
