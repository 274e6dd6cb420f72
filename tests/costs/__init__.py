"""What each test costs: `scripts/test --costs` writes COSTS.md beside this file."""
