"""How the ranks of a host agree on the units that they bring up together."""
