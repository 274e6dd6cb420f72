"""What RayZero writes as JSON and reads again: each record, with each entry damaged, is read or refused in one line."""

from __future__ import annotations

import copy
import hashlib
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from rayzero import __version__
from rayzero.checkpoint.manifest import Manifest
from rayzero.cluster.continuation import States
from rayzero.cluster.files.key_files import VIEWER_FILE, read_viewer
from rayzero.cluster.files.logger_feed import FeedState
from rayzero.cluster.files.run_record import RECORD, RunRecord, read_record
from rayzero.cluster.run import Member, Recovery, Rescaled
from rayzero.elastic.scaling import ScaleRequest, take
from rayzero.errors import RayZeroError
from rayzero.layout.model_layout import ModelLayout, lay_out_unit
from rayzero.protocol.messages import FileEntry, ModelSpec, canonical_json
from rayzero.records import parse_record
from rayzero.store.wire.translate import spec_from_bytes
from rayzero.telemetry.scrape import Viewer
from rayzero.telemetry.spans import Recorded, TraceSpan
from rayzero.telemetry.stats import Stats

ODD: list[Any] = [None, True, -1, 2**64, 10**400, 1.5, float("nan"), "", "x", "\ud800", [], [None], {}, {"a": []}]


@dataclass(frozen=True)
class Kind:
    """A kind of record: one that is sound, how it is read, and how it gets the hashes that it should have."""

    sound: dict[str, Any]
    read: Callable[[Path, bytes], object]
    rehashed: Callable[[dict[str, Any]], dict[str, Any]] = lambda record: record


def file(name: str, read: Callable[[Path], object]) -> Callable[[Path, bytes], object]:
    """Reads a record by the function for its file."""

    def read_file(folder: Path, content: bytes) -> object:
        (folder / name).write_bytes(content)
        return read(folder)

    return read_file


def requested(folder: Path) -> object:
    """A request that is set aside is a line in the log."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("rayzero.elastic.scaling")
    log.addHandler(handler)
    try:
        found = take(folder)
    finally:
        log.removeHandler(handler)
    if said:
        raise ValueError(*said)
    return found


MEMBER = Member(who="rank 0", pid=7, node="n", host="h")
RUN = {
    "rayzero": __version__,
    "run": "demo", "state": "running", "error": None, "started_at": 1.0, "ended_at": None,
    "driver": {"pid": 1, "host": "h"}, "ray_address": "h:1", "members": [asdict(MEMBER)],
    "spares": [asdict(MEMBER)], "addresses": ["h:2"],
    "recoveries": [asdict(Recovery(who="rank 0", pid=7, seconds=2.0))], "replacing": ["rank 1"], "rescaling": "said",
    "rescales": [asdict(Rescaled(id="a", why="asked for", before=1, after=2, failed=None))],
    "telemetry": {"http_sd": "u", "page": "u", "targets": [{"address": "h:3", "labels": {"role": "rank"}}]},
    "loggers": [{"logger": "csv", "where": "w", "sent": 1, "lost": 0, "step": 1, "error": None, "complete": True}],
    "metrics": {"0": {"loss": 1.0}}, "checkpoint": "c", "checkpoints_elsewhere": ["c"], "resumed_from": "c",
    "states": asdict(States(lineage="l", directory="/dev/shm", memory="m")), "measured": {"rank 0": {}},
    "config": {"zero": {}},
}  # fmt: skip

LAYOUT = ModelLayout(units=(lay_out_unit(0, "u", torch.float32, True, [("w", (2, 3))]),), shard_numel=64)
SPEC = ModelSpec(run="r", layout=LAYOUT, world_size=1, optimizer="a:B", hyper=({"lr": 0.1},), group_of=((0,),))
PIECE = {"param": "w", "kind": "master", "start": 0, "stop": 6, "shape": [2, 3], "dtype": "float32", "sha256": "0" * 64}
MANIFEST = Manifest(
    step=3,
    spec=SPEC,
    hyper=SPEC.hyper,
    slot_steps={"w": 3},
    owner_files=(FileEntry(name="owner-000.safetensors", size_bytes=8, sha256="0" * 64, content={"w/0": PIECE}),),
    rank_files=(
        FileEntry(
            name="rank-0000.safetensors",
            size_bytes=8,
            sha256="0" * 64,
            content={"state/rng": {"shape": [5], "dtype": "uint8"}},
        ),
    ),
)
SPAN = TraceSpan("compute", "forward", 0.0, 1.0, 3)
SPANS = Recorded(host="h", node="n", pid=1, wall_offset=0.5, full=False, spans=(SPAN,))


def hashed(manifest: dict[str, Any]) -> dict[str, Any]:
    """With the hash of its entries."""
    body = {name: value for name, value in manifest.items() if name != "sha256"}
    return body | {"sha256": hashlib.sha256(canonical_json(body).encode()).hexdigest()}


KINDS = {
    "run": Kind(RUN, file(RECORD, read_record)),
    "request": Kind(
        ScaleRequest(num_optimizers=3, avoid=("n",), placement="packed").model_dump(mode="json"),
        file("scale-x.json", requested),
    ),
    "viewer": Kind(asdict(Viewer(token="t", trusted="PEM", client="PEM")), file(VIEWER_FILE, read_viewer)),
    "bookmark": Kind(
        {"step": 3, "rows": 1, "memory": {"id": "x"}},
        file("csv.json", lambda folder: FeedState.read(folder / "csv.json")),
    ),
    "spans": Kind(SPANS.to_json(), lambda _, content: parse_record(content, Recorded)),
    "stats": Kind(Stats().to_json(), lambda _, content: Stats.from_json(json.loads(content))),
    "spec": Kind(SPEC.to_json(), lambda _, content: spec_from_bytes(content)),
    "manifest": Kind(
        json.loads(MANIFEST.to_json()), lambda _, content: Manifest.from_json(content.decode(), "manifest.json"), hashed
    ),
}


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON value."""
    if path:
        yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, one in inner:
        yield from places(one, (*path, key))


def refusal(kind: Kind, folder: Path, content: bytes) -> str | None:
    """The line with which a content is refused; None: it is read."""
    line = None
    try:
        kind.read(folder, content)
    except (RayZeroError, ValueError) as error:
        line = str(error)
    assert line is None or ("\n" not in line and len(line) < 700)
    return line


def damaged(kind: Kind, path: tuple[Any, ...], change: Callable[[Any, Any], object]) -> bytes:
    record: Any = json.loads(json.dumps(copy.deepcopy(kind.sound)))
    at = record
    for key in path[:-1]:
        at = at[key]
    change(at, path[-1])
    return json.dumps(kind.rehashed(record)).encode()


def names(line: str, path: tuple[Any, ...]) -> bool:
    """Whether a refusal says which entry is wrong, or that a hash or the whole do not fit any more."""
    whole = ("digest", "JSON", "format", "complete", "was written")
    return any(str(key) in line for key in path) or any(word in line for word in whole)


@pytest.mark.parametrize("name", KINDS)
def test_a_sound_record_is_read_also_one_of_a_later_version(name: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    assert refusal(kind, tmp_path, json.dumps(kind.sound).encode()) is None
    later = refusal(kind, tmp_path, json.dumps(kind.rehashed(kind.sound | {"of_a_later_version": {"a": 1}})).encode())
    assert ("of_a_later_version is unknown" in str(later)) if name in ("spec", "stats") else later is None


@pytest.mark.parametrize("name", KINDS)
def test_a_damaged_entry_is_read_or_named_in_one_line(name: str, tmp_path: Path) -> None:
    kind, refused = KINDS[name], 0
    for path in places(json.loads(json.dumps(kind.sound))):
        for value in ODD:
            line = refusal(kind, tmp_path, damaged(kind, path, lambda at, key, value=value: at.__setitem__(key, value)))
            assert line is None or names(line, path), (path, value)
            refused += line is not None
        line = refusal(kind, tmp_path, damaged(kind, path, lambda at, key: at.pop(key)))
        assert line is None or names(line, path), path
    assert refused > 8 * len(kind.sound)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"\0", b"[" * 5000, b'{"a": ' * 5000])
def test_what_is_no_record_at_all_is_refused_in_one_line(name: str, content: bytes, tmp_path: Path) -> None:
    if name == "stats" or (name == "manifest" and content == b"\xff\xfe"):
        pytest.skip("who calls has read the JSON")
    assert refusal(KINDS[name], tmp_path, content)


def test_the_record_of_a_run_has_every_entry_here() -> None:
    assert RUN.keys() == RunRecord.model_fields.keys()


@pytest.mark.parametrize(
    ("name", "path", "value", "line"),
    [
        ("run", ("driver", "pid"), "x", "driver.pid is 'x' but must be a valid integer; restore it from a copy"),
        ("run", ("state",), "on", "state is 'on' but must be 'starting', 'running', 'finished', 'failed' or 'stopped'"),
        ("run", ("members", 0, "who"), 3, "members.0.who is 3 but must be a valid string"),
        ("run", ("recoveries", 0, "seconds"), float("inf"), "recoveries.0.seconds is inf but must be a finite number"),
        ("request", ("num_optimizers",), 0, "num_optimizers is 0 but must be greater than 0; ask again"),
        ("request", ("avoid",), "n", "avoid is 'n' but must be a list"),
        ("viewer", ("token",), 1, "token is 1 but must be a valid string; delete it"),
        ("bookmark", ("rows",), -1, "rows is -1 but must be greater than or equal to 0; delete it"),
        (
            "manifest",
            ("owner_files", 0, "size_bytes"),
            -1,
            "owner_files.0.size_bytes is -1 but must be greater than or",
        ),
        (
            "manifest",
            ("spec", "layout", "units", 0, "params", 0, 1),
            [1 << 61, 4],
            "must have fewer than 2**62 elements",
        ),
        ("manifest", ("spec", "layout", "units", 0, "params", 0, 1), [1] * 65, "must have at most 64 items"),
        ("manifest", ("spec", "group_of"), [[0, 0]], "spec.group_of does not have one number for each parameter"),
        ("manifest", ("spec", "world_size"), 2, "1 rank_files, and world_size 2"),
        ("manifest", ("rank_files", 0, "name"), "x", "rank_files have the names ['x'], and must have ['rank-0000.safe"),
        (
            "manifest",
            ("owner_files", 0, "sha256"),
            "0" * 63,
            "owner_files.0.sha256 is '000000000000...0000000000000' but must match",
        ),
        ("manifest", ("owner_files", 0, "content", "w/0", "kind"), "\n", "kind is '\\n' but must be printable text"),
        (
            "manifest",
            ("owner_files", 0, "content", "w/0", "moments"),
            "fp4",
            "moments is 'fp4' but must be one of bf16, int8",
        ),
        (
            "manifest",
            ("rank_files", 0, "content", "state/rng", "shape"),
            [-1],
            "tensor 'state/rng' of rank-0000.safetens",
        ),
        ("manifest", ("spec", "world_size"), True, "spec.world_size is True but must be a valid integer"),
        ("manifest", ("owner_files", 0, "content", "w/0", "dtype"), "f", "dtype is 'f' but must be a dtype that"),
        ("spec", ("group_of", 0, 0), -2, "group_of.0.0 is -2 but must be greater than or equal to -1"),
        (
            "spec",
            ("layout", "units", 0, "dtype"),
            "f",
            "layout: dtype 'f' is not one of ['bfloat16', 'float16', 'float",
        ),
        ("spec", ("layout", "units", 0, "params"), [["w", [2]], ["w", [3]]], "parameter 'w' comes twice"),
        ("spec", ("moments",), "fp4", "moments is 'fp4' but must be 'fp32', 'bf16' or 'int8'"),
        ("spans", ("spans", 0, 4), "x", "spans.0.4 is 'x' but must be a valid integer"),
        ("stats", ("steps", "count"), "3", "steps.count is '3' but must be a valid integer"),
    ],
)
def test_what_is_said_of_some(name: str, path: tuple[Any, ...], value: Any, line: str, tmp_path: Path) -> None:
    content = damaged(KINDS[name], path, lambda at, key: at.__setitem__(key, value))
    assert line in str(refusal(KINDS[name], tmp_path, content))
