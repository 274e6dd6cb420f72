"""The rank's end of the store: fetches, pushes, and what the rank asks of the lead."""
