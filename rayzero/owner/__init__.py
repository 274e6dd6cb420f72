"""The owner: receives gradients, reduces them, updates the masters and publishes the parameters. Knows no transport."""
