"""An owner of another process as the lead reaches it: through shared memory, or over gRPC."""
