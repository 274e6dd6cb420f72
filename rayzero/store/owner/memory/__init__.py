"""Memory that an owner shares with the ranks of its host, in slabs: this epoch's, and the next one's."""
