"""From a decision to new masters: the optimizers and what they change."""
