"""Write json/*.json from pages/, and prometheus/prometheusrule.yaml from its rules.yaml.

``--check``: exit 1 where a file is not what it would write."""

from __future__ import annotations

import sys
from pathlib import Path

import yaml

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from dashboards.grafana import to_json  # noqa: E402
from dashboards.pages import PAGES  # noqa: E402


def prometheus_rule(rules: str) -> str:
    """The rules as the Prometheus operator takes them."""
    head = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "rayzero", "labels": {"release": "prometheus"}},
    }
    return yaml.safe_dump(head | {"spec": yaml.safe_load(rules)}, sort_keys=False, width=1000)


def main() -> int:
    """Write or check every dashboard."""
    target = HERE / "json"
    made = {target / f"{page.uid}.json": to_json(page) for page in PAGES}
    made[HERE / "prometheus" / "prometheusrule.yaml"] = prometheus_rule(
        (HERE / "prometheus" / "rules.yaml").read_text()
    )
    if "--check" in sys.argv[1:]:
        stale = [path.name for path, text in made.items() if not path.exists() or path.read_text() != text]
        stale += [path.name for path in target.glob("*.json") if path not in made]
        if stale:
            print(f"not current: {', '.join(sorted(stale))}; run dashboards/generate.py", file=sys.stderr)
            return 1
        print(f"{len(made)} files of dashboards/ are current")
        return 0
    target.mkdir(exist_ok=True)
    for path in target.glob("*.json"):
        path.unlink()
    for path, text in made.items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
