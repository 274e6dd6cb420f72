"""How parameters and gradients get from ranks to owners and back: in one process, over gRPC, in shared memory."""

import os

# gRPC's handlers of fork(), which a rank's DataLoader calls for its workers: they do nothing while a stream is open, as
# ours always are, and print a line each time that they did nothing. No worker calls gRPC. Read when grpc is first used.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
