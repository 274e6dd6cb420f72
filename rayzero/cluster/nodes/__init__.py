"""Ray and its nodes: joining a cluster, and which process gets a place where."""
