"""A rank's connection to owners in other processes: the way to each of them, the handshake, calls to the lead."""
