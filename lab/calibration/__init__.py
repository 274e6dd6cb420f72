"""What the simulation of a step must know of this machine: measured, fitted, compared with real steps."""
