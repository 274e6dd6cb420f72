"""A run's files: its record, its lock, its checkpoints, metrics.jsonl and its trace."""
