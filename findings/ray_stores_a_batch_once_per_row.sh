#!/usr/bin/env bash
# Ray 2.60.0 with torch 2.13.0: a list of a batch's rows takes the whole batch in the object store once for each row.
#
# Expected: list(batch) is as many views of one memory. torch.save writes that memory once for all of them, as torch's
#   notes on serialization say, and Ray stores the same list of NumPy's rows in the size of the batch.
# Seen: 64 rows of a batch of 4 MiB are 256 MiB in the object store. Ray pickles tensors, a tensor's pickle is its whole
#   storage, and pickle does not see that two tensors have the same one: each view brings a copy. What ray.get() returns
#   holds 256 MiB too, and rows that were one memory are 64. The cost grows with the square of the batch. It is so for
#   split() and unbind(), for the samples that are cut from a buffer, and for a state_dict() with tied weights (two copies,
#   no longer tied). A row that is cloned costs a row.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check ray==2.60.0 torch==2.13.0 numpy==2.4.6
cat >"$folder/rows.py" <<'PY'
import io
import sys

import ray
import torch

MIB = 2**20
batch = torch.zeros(64, MIB // 64)  # 4 MiB of float32


def stored(value: object) -> tuple[int, object]:
    """(MiB in the object store, what comes back)"""
    ref = ray.put(value)
    return round(ray.experimental.get_object_locations([ref])[ref]["object_size"] / MIB), ray.get(ref)


ray.init(num_cpus=1, include_dashboard=False, logging_level="ERROR", object_store_memory=700 * MIB)
sizes = {"batch": stored(batch)[0], "NumPy's rows": stored(list(batch.numpy()))[0]}
sizes["cloned rows"] = stored([row.clone() for row in batch])[0]
sizes["rows"], returned = stored(list(batch))
sizes["rows that came back"] = sum({row.untyped_storage().data_ptr(): row.untyped_storage().nbytes()
                                    for row in returned}.values()) // MIB
ray.shutdown()
file = io.BytesIO()
torch.save(list(batch), file)
sizes["rows by torch.save"] = round(len(file.getvalue()) / MIB)
print(f"ray {ray.__version__}, torch {torch.__version__}: MiB of {sizes}")
large = {"rows", "rows that came back"}
sys.exit(any(size != (256 if name in large else 4) for name, size in sizes.items()))
PY
cd "$folder" && "$folder/venv/bin/python" rows.py 2>"$folder/log" || {
  tail -n 20 "$folder/log"
  exit 1
}
