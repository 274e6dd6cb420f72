"""What tests and campaigns have beside the package: a CUDA device played on the CPU, faults at points of a run."""
