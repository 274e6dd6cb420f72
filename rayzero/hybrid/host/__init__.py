"""The host side of the hybrid optimizer: buckets, their transfers, and their updates."""
