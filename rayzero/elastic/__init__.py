"""Who takes the place of a member that dies."""
