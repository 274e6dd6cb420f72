"""Transfers to and from one owner over the network."""
