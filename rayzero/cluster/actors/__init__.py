"""The driver's end of a run's processes: it makes, calls, replaces and ends them."""
