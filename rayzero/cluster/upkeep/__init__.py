"""What the driver does while a run goes on: it follows events, replaces who dies, and changes the owners."""
