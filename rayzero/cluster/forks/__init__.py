"""Ray and its nodes: joins a cluster, and places a run's processes on it."""
