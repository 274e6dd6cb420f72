#!/usr/bin/env bash
# Ray 2.60.0 on Linux: each worker process starts an interpreter twice and imports ray in both, also without a runtime_env.
#
# Expected: a worker is one start of the interpreter and one import of ray.
# Seen: the raylet starts setup_worker.py, which imports all of ray to read an (empty) runtime environment, replaces itself
#   by bash, and that by a second interpreter with default_worker.py, which imports ray again. The process id stays, so
#   neither ps nor a profiler that attaches later shows it. The first import is about half of a worker's start.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check ray==2.60.0
mkdir "$folder/site"
cat >"$folder/site/sitecustomize.py" <<'PY'
"""Notes for each interpreter its process, its script, and the CPU seconds that it had used when ray was imported."""
import os
import sys
import time


class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "ray.core.generated.common_pb2":  # what both scripts need last
            seconds = time.process_time()
            script = os.path.basename(sys.argv[0]) if sys.argv else "?"
            with open(os.environ["STARTS"], "a") as file:
                file.write(f"{os.getpid()} {script} {seconds:.2f}\n")
        return None


sys.meta_path.insert(0, Watch())
PY
cat >"$folder/one_worker.py" <<'PY'
import os
import sys
from collections import defaultdict

import ray

ray.init(num_cpus=1, include_dashboard=False, logging_level="ERROR", object_store_memory=100_000_000)


@ray.remote
def who() -> int:
    return os.getpid()


worker = ray.get(who.remote())
ray.shutdown()
starts = defaultdict(list)
with open(os.environ["STARTS"]) as file:
    for line in file:
        pid, script, seconds = line.split()
        starts[int(pid)].append((script, float(seconds)))
said = ", then ".join(f"{script} after {seconds:.2f} CPU s" for script, seconds in starts[worker])
print(f"ray {ray.__version__}: the process of one worker imported ray in {said}")
sys.exit([script for script, _ in starts[worker]] != ["setup_worker.py", "default_worker.py"])
PY
cd "$folder" && STARTS="$folder/starts" PYTHONPATH="$folder/site" "$folder/venv/bin/python" one_worker.py 2>/dev/null
