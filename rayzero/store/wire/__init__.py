"""What both ends of gRPC agree on: methods, messages, and tensor bytes without copies."""
