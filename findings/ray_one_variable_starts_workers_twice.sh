#!/usr/bin/env bash
# Ray 2.60.0 on Linux: a runtime_env that sets one variable makes each of its workers import ray twice.
#
# Expected: the raylet starts the worker with that variable in its environment.
# Seen: it starts setup_worker.py, which imports all of ray to read the one entry, replaces itself by bash, and that by
#   a second interpreter with default_worker.py, which imports ray again. The process id stays, so neither ps nor a
#   profiler that attaches later shows it. Workers without a runtime_env start once.
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
cat >"$folder/two_workers.py" <<'PY'
import os
import sys
from collections import defaultdict

import ray

ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR", object_store_memory=100_000_000)


@ray.remote
def who() -> int:
    return os.getpid()


plain, with_variable = ray.get(who.remote()), ray.get(who.options(runtime_env={"env_vars": {"ONE": "1"}}).remote())
ray.shutdown()
starts = defaultdict(list)
with open(os.environ["STARTS"]) as file:
    for line in file:
        pid, script, seconds = line.split()
        starts[int(pid)].append((script, float(seconds)))


def told(worker: int) -> str:
    return ", then ".join(f"{script} (at {seconds:.2f} CPU s)" for script, seconds in starts[worker])


print(f"ray {ray.__version__}: a worker imports ray in {told(plain)}; with one variable in {told(with_variable)}")
found = [[script for script, _ in starts[worker]] for worker in (plain, with_variable)]
sys.exit(found != [["default_worker.py"], ["setup_worker.py", "default_worker.py"]])
PY
cd "$folder" && STARTS="$folder/starts" PYTHONPATH="$folder/site" "$folder/venv/bin/python" two_workers.py 2>/dev/null
