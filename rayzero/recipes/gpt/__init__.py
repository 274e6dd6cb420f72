"""A small GPT, and its shape, which is checked without torch."""
