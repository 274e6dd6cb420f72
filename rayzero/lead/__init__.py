"""The lead: turns the inputs of all ranks into one decision per step. Knows no transport."""
