"""Every interpreter that a measured test starts imports this: it notes its start, and its import of torch.

The note says which test was running: pytest sets the variable. A node of Ray counts by its log monitor."""

import os
import sys


def _note(event: str) -> None:
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    with open(os.path.join(os.environ["RAYZERO_COSTS"], "processes"), "a") as notes:
        notes.write(f"{event}\t{test}\n")  # one write, shorter than a pipe's: lines of several processes do not mix


class _Imports:
    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "torch":
            _note("torch")


if "RAYZERO_COSTS" in os.environ:
    _note("ray" if any(word.endswith("log_monitor.py") for word in sys.orig_argv) else "python")
    sys.meta_path.insert(0, _Imports())
