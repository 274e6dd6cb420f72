"""A rank's links to owners: channels that break and are opened again."""
