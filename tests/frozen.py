"""What the fork server imports last: a collection of garbage in its processes passes over all that it has imported.

It would write to each of these objects, and so copy the memory that processes share with the server.
"""

import gc

gc.freeze()
