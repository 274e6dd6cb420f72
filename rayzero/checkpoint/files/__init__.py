"""A checkpoint's files, byte by byte: written from front to back, and checked before anything in them is used."""
