"""The processes of a run (coordinator, rank workers, optimizer actors) and the exporters that serve their metrics."""
