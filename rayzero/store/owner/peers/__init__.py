"""An owner as the lead reaches it: in this process, through shared memory, or over gRPC."""
