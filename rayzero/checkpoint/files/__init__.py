"""The files of a checkpoint, byte by byte: written front to back, read without trust."""
