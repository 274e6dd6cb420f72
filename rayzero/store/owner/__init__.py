"""The owner's end of the store: its server, the handlers of its calls, and its shared memory."""
