"""Calls between two processes of a host, and their bytes."""
