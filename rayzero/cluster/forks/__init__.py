"""A host's fork server: Ray workers of a run that need not import everything again."""
