"""How calls come to an owner: over gRPC, and through the memory of its host."""
