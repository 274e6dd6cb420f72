"""The owner's end of the store: the server, what it does for each call, and its shared memory."""
