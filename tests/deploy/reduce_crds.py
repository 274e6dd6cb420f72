"""Reduces KubeRay's custom resource definitions to the schemas that validate manifests: without texts, and with each
part that occurs more than once written once.

    python tests/deploy/reduce_crds.py ray.io_rayclusters.yaml ray.io_rayjobs.yaml > tests/deploy/kuberay.json

The definitions are in KubeRay's repository, in helm-chart/kuberay-operator/crds.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

LEAST = 160  # characters of a part that is worth a name


def strict(schema: Any, *, named: bool = False) -> Any:
    """As the API server reads it: unknown fields are errors, metadata is anything, integers may be text. ``named``: a
    mapping of fields, whose keys are not keywords."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if named:
        return {key: strict(value) for key, value in schema.items()}
    made = {key: strict(value, named=key == "properties") for key, value in schema.items() if key != "description"}
    if made.pop("x-kubernetes-int-or-string", False):
        made.pop("type", None)
    if "properties" in made:
        if not made.get("x-kubernetes-preserve-unknown-fields"):
            made.setdefault("additionalProperties", False)
        if "metadata" in made["properties"]:
            made["properties"]["metadata"] = {"type": "object"}
    return {key: value for key, value in made.items() if not key.startswith("x-kubernetes-") and key != "default"}


def parts(schema: Any) -> Iterator[str]:
    """Every part that is long enough, as text."""
    for inner in schema if isinstance(schema, list) else schema.values() if isinstance(schema, dict) else ():
        yield from parts(inner)
    if isinstance(schema, dict) and len(text := json.dumps(schema, sort_keys=True)) >= LEAST:
        yield text


def share(schema: Any, often: Counter[str], made: dict[str, Any]) -> Any:
    """The same schema, with parts that occur often as references to ``made``."""
    if isinstance(schema, list):
        return [share(item, often, made) for item in schema]
    if not isinstance(schema, dict):
        return schema
    text = json.dumps(schema, sort_keys=True)
    inner = {key: share(value, often, made) for key, value in schema.items()}
    if often[text] < 2 or "type" not in schema:  # a mapping of fields is no schema
        return inner
    name = hashlib.sha256(text.encode()).hexdigest()[:8]
    made[name] = inner
    return {"$ref": f"#/$defs/{name}"}


def reduced(definitions: list[dict[str, Any]]) -> dict[str, Any]:
    """One document: kind to schema of version v1, and what they share."""
    kinds = {}
    for one in definitions:
        versions = {version["name"]: version["schema"]["openAPIV3Schema"] for version in one["spec"]["versions"]}
        kinds[one["spec"]["names"]["kind"]] = strict(versions["v1"])
    often, made = Counter(parts(kinds)), {}
    shared = {kind: share(schema, often, made) for kind, schema in kinds.items()}
    return {
        "$comment": "KubeRay (Apache-2.0), its definitions of version v1, reduced by tests/deploy/reduce_crds.py",
        "kinds": shared,
        "$defs": made,
    }


if __name__ == "__main__":
    read = [yaml.load(Path(path).read_text(), yaml.CSafeLoader) for path in sys.argv[1:]]
    print(json.dumps(reduced(read), separators=(",", ":"), sort_keys=True))
