"""What both ends of the gRPC store agree on: methods, messages, and the connections beside them."""
