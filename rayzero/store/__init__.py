"""Moves parameters and gradients between ranks and owners: in one process, over gRPC, through shared memory."""

import os

# This switches off gRPC's fork() handlers, which run when a rank's DataLoader starts workers. They do nothing while a
# stream is open, as ours always are, and print a line each time. No worker calls gRPC. grpc reads it at its first use.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
