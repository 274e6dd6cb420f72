"""Long runs: what faults, memory limits, many ranks and other owners do to a training; pictures of the docs."""
