"""An owner's calls while they run: how long they wait, over which link they came, how much they may hold."""
