"""The update rules: how a decision becomes new masters."""
