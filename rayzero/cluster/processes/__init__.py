"""The processes of a run: coordinator, rank workers, optimizer actors, and what each tells of itself."""
