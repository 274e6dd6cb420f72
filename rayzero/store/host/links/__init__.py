"""Links to owners: channels that break and are opened again."""
