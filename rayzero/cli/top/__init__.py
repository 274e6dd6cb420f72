"""``rayzero top``."""
