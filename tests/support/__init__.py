"""What tests and campaigns have beside the package: a CUDA device played on the CPU, faults at points of a run,
waiting for what others do, what a test leaves behind, marks of what it needs."""
