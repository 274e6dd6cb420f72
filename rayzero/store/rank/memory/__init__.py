"""Memory that a rank shares with the owners of its host: its gradients, and the owners' parameters."""
