#!/usr/bin/env bash
# Ray Data 2.60.0: one NaN in a column and StandardScaler makes all of it null, though NaN is to be ignored.
#
# Expected: mean() and its kin "consider np.nan, None, and pd.NaT to be null", and with ignore_nulls=True (the default) null
#   values are ignored: of 1,000 numbers of which one is NaN, the mean is that of the 999 others.
# Seen: so it is for None, and for NaN in what from_pandas() reads, as it turns NaN into null. In what map_batches() returns,
#   or NumPy and items bring, NaN stays what it is: max() and min() pass over it, as promised, and mean(), std() and sum()
#   are None, in any number of blocks. StandardScaler takes that None without a word: fit() succeeds, and transform()
#   gives null for all 1,000 rows, not for one. The feature is gone, in training as in serving, and a loader that fills
#   nulls with 0 trains on a constant. The same pipeline tried with a DataFrame is right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check "ray[data]==2.60.0" numpy==2.4.6 pandas==3.1.1 \
  pyarrow==26.0.1
cat >"$folder/means.py" <<'PY'
import sys

import numpy as np
import pandas as pd
import ray
import ray.data
from ray.data.aggregate import Max, Mean, Std, Sum
from ray.data.preprocessors import StandardScaler

ROWS, AT = 1000, 900


def column(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The row's number, and NaN in one row."""
    return {"number": np.where(batch["id"] == AT, np.nan, batch["id"].astype(float))}


def described(data: ray.data.Dataset) -> dict[str, float | None]:
    found = data.aggregate(Max("number"), Sum("number"), Mean("number"), Std("number"))
    return {name: value if value is None else round(value, 1) for name, value in found.items()}


ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR")
ray.data.DataContext.get_current().enable_progress_bars = False
numbers = np.array([float(row) for row in range(ROWS) if row != AT])
reference = {"max(number)": numbers.max(), "sum(number)": numbers.sum(), "mean(number)": numbers.mean(),
             "std(number)": numbers.std(ddof=1)}
reference = {name: round(float(value), 1) for name, value in reference.items()}
blocks = {count: ray.data.range(ROWS, override_num_blocks=count).map_batches(column, batch_size=None).materialize()
          for count in (1, 4)}
frame = pd.DataFrame({"number": [np.nan if row == AT else float(row) for row in range(ROWS)]})
found = {"NumPy": reference, "from_pandas": described(ray.data.from_pandas(frame))} | {
    f"{count} blocks": described(data) for count, data in blocks.items()
}
print(f"ray {ray.__version__}, {ROWS} numbers of which one is NaN:")
for name, values in found.items():
    print(f"  {name}: {values}")


def nulls(data: ray.data.Dataset) -> int:
    """How many rows are null after StandardScaler."""
    rows = StandardScaler(["number"]).fit_transform(data).take_all()
    assert len(rows) == ROWS
    return sum(row["number"] is None or bool(np.isnan(row["number"])) for row in rows)


scaled = {"from_pandas": nulls(ray.data.from_pandas(frame)), "4 blocks": nulls(blocks[4])}
print(f"  null after StandardScaler: {scaled}")
right = found["from_pandas"] == reference
lost = {"sum(number)": None, "mean(number)": None, "std(number)": None}
wrong = all(found[f"{count} blocks"] == reference | lost for count in blocks) and blocks[4].mean("number") is None
sys.exit(not (right and wrong and scaled == {"from_pandas": 1, "4 blocks": ROWS}))
PY
cd "$folder" && RAY_TMPDIR="$folder" "$folder/venv/bin/python" -W ignore means.py 2>"$folder/log" || {
  tail -n 20 "$folder/log"
  exit 1
}
