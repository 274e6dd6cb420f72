"""The rank's end of the store, without a network: fetches, pushes, its memory, and what it keeps of its history."""
