"""How the lead reaches an owner in another process: through shared memory, or over gRPC."""
