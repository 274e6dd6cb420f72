"""A run's files: its record, lock, checkpoints, trace and metrics.jsonl, which a process for each logger follows."""
