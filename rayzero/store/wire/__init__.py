"""What both ends of the gRPC store agree on: methods, messages, and tensor bytes without extra copies."""
