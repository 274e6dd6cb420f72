"""Checkpoints from a rank's side: saving, resuming, and loading into a prepared model."""
