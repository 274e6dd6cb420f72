"""Transfers between one rank and one owner: over gRPC, or by a copy within the host."""
