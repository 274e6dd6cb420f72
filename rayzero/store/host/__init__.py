"""What brings bytes and news from the owners of other hosts to one host, and keeps its copy of their parameters."""
