"""Units: which parameters belong together, when they are unsharded and resharded, and how their bytes are copied."""
