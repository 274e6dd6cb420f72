"""Values of parameters and optimizer states that users read or write."""
