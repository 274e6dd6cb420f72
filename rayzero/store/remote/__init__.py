"""A rank's connection to owners in other processes: links to each of them, and what travels over these links."""
