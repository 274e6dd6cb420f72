"""What a model starts with: where first values come from, for models that fit nowhere whole."""
