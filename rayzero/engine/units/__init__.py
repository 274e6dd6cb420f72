"""Units: which parameters belong together, when they come up and go down, and how their bytes travel."""
