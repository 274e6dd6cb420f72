"""Values of parameters that users read, write, load or exchange."""
