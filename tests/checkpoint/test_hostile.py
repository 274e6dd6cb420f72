"""Checkpoints that were made to harm: refused in one line, at once and in little memory, or harmless."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import rayzero
from rayzero.checkpoint import CheckpointReader
from rayzero.checkpoint.manifest import Manifest, rank_file_name
from rayzero.convert.conversion import export_full
from rayzero.engine.context import RankContext, running_in
from rayzero.errors import CheckpointError
from rayzero.protocol.messages import MASTER, canonical_json
from rayzero.records import check_record

from .conftest import Written, random_values, require_one_line, small_layout
from .test_damage import edit_manifest
from .test_refusals import mlp, one_step, prepared

OWNER, RANK, MANIFEST = "owner-000.safetensors", "rank-0000.safetensors", "manifest.json"

Values = dict[str, torch.Tensor]


def read_all(directory: Path) -> Values:
    """Everything that a checkpoint gives to anybody."""
    with CheckpointReader(directory) as reader:
        found: Values = {}
        for unit in reader.layout.units:
            for slot in unit.slots:
                for kind in reader.kinds(slot.name):
                    found[f"{slot.name}/{kind}"] = reader.read_slice(slot.name, kind, 0, slot.numel).view(slot.shape)
        state, tensors = reader.rank_state(0)
        found |= {f"state/{name}": tensor for name, tensor in tensors.items()}
        found |= {f"buffer/{name}": tensor for name, tensor in reader.buffers().items()}
        found[f"said {state} {reader.tied()} {reader.step} {reader.hyper}"] = torch.zeros(0)
    return found


def same(ours: Values, theirs: Values) -> bool:
    return ours.keys() == theirs.keys() and all(
        a.dtype == theirs[name].dtype and a.shape == theirs[name].shape and torch.equal(a, theirs[name])
        for name, a in ours.items()
    )


def refusal_of(directory: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_all(directory)
    return require_one_line(caught.value)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("hostile") / "step-000030"
    layout = small_layout()
    Written(layout, random_values(layout)).save(directory, num_owners=1)
    return directory


@pytest.fixture
def victim(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / whole.name))


# ---- headers


def header_bytes(path: Path) -> int:
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


@pytest.mark.promise("refused", "checkpoints")
@pytest.mark.parametrize("name", [OWNER, RANK, MANIFEST])
@settings(
    max_examples=settings.default.max_examples * 3 // 2, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_a_changed_header_is_refused_or_changes_no_value(whole: Path, tmp_path: Path, name: str, data: Any) -> None:
    directory = tmp_path / whole.name
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(whole, directory)
    content = bytearray((directory / name).read_bytes())
    header = len(content) if name == MANIFEST else header_bytes(directory / name)
    at = data.draw(st.integers(0, header - 1))
    change = data.draw(st.one_of(st.integers(0, 7).map(lambda bit: content[at] ^ 1 << bit), st.integers(0, 255)))
    content[at] = change
    (directory / name).write_bytes(content)
    try:
        found = read_all(directory)
    except CheckpointError as error:
        require_one_line(error)
    else:
        assert same(found, read_all(whole))


@pytest.mark.parametrize("code", ["I32", "U32", "F16", "F64", "F99"])
def test_a_changed_dtype_of_every_tensor_is_refused(victim: Path, code: str) -> None:
    path, size = victim / OWNER, header_bytes(victim / OWNER)
    content = path.read_bytes()
    text = content[8:size].replace(b'"F32"', f'"{code}"'.encode()).rstrip()
    assert len(text) <= size - 8
    path.write_bytes(content[:8] + text.ljust(size - 8) + content[size:])
    assert OWNER in refusal_of(victim)
    with pytest.raises(CheckpointError, match=OWNER):
        CheckpointReader(victim).verify()
    with pytest.raises(CheckpointError, match=OWNER):
        export_full(victim, victim.parent / "out")
    assert not list((victim.parent / "out").glob("*"))


def rewrite_header(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a safetensors header as JSON; the file may get another length, and the manifest knows it."""
    content, size = path.read_bytes(), header_bytes(path)
    header = json.loads(content[8:size])
    change(header)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[size:])
    restate(path)


def restate(path: Path, *, hashed: bool = True) -> None:
    """Have the manifest say the file's present size, if it has one, and its hash."""
    try:
        said: dict[str, Any] = {"size_bytes": path.stat().st_size}
    except OSError:
        return
    said |= {"sha256": hashlib.sha256(path.read_bytes()).hexdigest()} if hashed else {}

    def change(described: dict[str, Any]) -> None:
        for entry in described["owner_files"] + described["rank_files"]:
            if entry["name"] == path.name:
                entry.update(said)

    edit_manifest(path.parent, change)


def swap_offsets(header: dict[str, Any]) -> None:
    first, second = [one for one in header.values() if one.get("shape") == [128]][:2]
    first["data_offsets"], second["data_offsets"] = second["data_offsets"], first["data_offsets"]


HEADERS: dict[str, Callable[[dict[str, Any]], object]] = {
    "a tensor more": lambda h: h.update(more={"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}),
    "a tensor less": lambda h: h.pop(next(iter(h))),
    "another shape": lambda h: next(iter(h.values())).update(shape=[2, 64]),
    "overlapping": lambda h: [one.update(data_offsets=[0, 512]) for one in h.values() if one.get("shape") == [128]],
    "swapped": swap_offsets,
    "beyond the end": lambda h: next(iter(h.values())).update(data_offsets=[0, 1 << 60]),
    "huge": lambda h: next(iter(h.values())).update(shape=[1 << 61], data_offsets=[0, 1 << 63]),
    "many dimensions": lambda h: next(iter(h.values())).update(shape=[1 << 40] * 1000),
    "no object": lambda h: h.update(more=[]),
    "texts": lambda h: next(iter(h.values())).update(data_offsets=["0", "4"]),
}


@pytest.mark.parametrize("change", HEADERS.values(), ids=HEADERS.keys())
def test_a_header_that_was_rewritten_with_its_manifest_is_refused(victim: Path, change: Any) -> None:
    rewrite_header(victim / OWNER, change)
    assert OWNER in refusal_of(victim)


@pytest.mark.parametrize("name", [OWNER, RANK])
@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"\0" * 8,
        (2**63).to_bytes(8, "little"),
        (2**64 - 1).to_bytes(8, "little"),
        (4).to_bytes(8, "little") + b"null",
        (4).to_bytes(8, "little") + b"\xff\xff\xff\xff",
        (200_000).to_bytes(8, "little") + b"[" * 200_000,
        (16).to_bytes(8, "little") + b'{"__metadata__":',
        (22).to_bytes(8, "little") + b'{"__metadata__": null}',
        (24).to_bytes(8, "little") + b'{"__metadata__":{"a":1}}',
    ],
)
def test_any_other_beginning_of_a_file_is_refused(victim: Path, name: str, head: bytes) -> None:
    (victim / name).write_bytes(head)
    restate(victim / name)
    assert name in refusal_of(victim)


@pytest.mark.parametrize("key", ["state", "tied"])
@pytest.mark.parametrize("text", [None, "", "[]", "[" * 200_000, '{"a": 1}', '{"a": ["w"]}', '{"w": "b"}', "\x00"])
def test_metadata_of_a_rank_that_are_missing_or_something_else_are_refused(victim: Path, key: str, text: str) -> None:
    def change(header: dict[str, Any]) -> None:
        header["__metadata__"].pop(key) if text is None else header["__metadata__"].update({key: text})

    rewrite_header(victim / RANK, change)
    if key == "state" and text is not None and text.startswith("{"):
        read_all(victim)  # a loop's own
    else:
        assert RANK in refusal_of(victim)


# ---- what is no regular file in the folder


def fifo(path: Path) -> None:
    os.mkfifo(path)


def listening(path: Path) -> None:
    held = socket.socket(socket.AF_UNIX)
    here = os.getcwd()
    os.chdir(path.parent)  # a socket's name is short
    try:
        held.bind(path.name)
    finally:
        os.chdir(here)
        held.close()


def sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 42)


def sparse_copy(path: Path) -> None:
    """A right beginning, and then four terabytes."""
    path.write_bytes((path.with_name(path.name + ".was")).read_bytes())
    os.truncate(path, 1 << 42)


PLACES: dict[str, Callable[[Path], None]] = {
    "fifo": fifo,
    "socket": listening,
    "zero": lambda path: path.symlink_to("/dev/zero"),
    "null": lambda path: path.symlink_to("/dev/null"),
    "stdin": lambda path: path.symlink_to("/dev/stdin"),
    "itself": lambda path: path.symlink_to(path.name),
    "outside": lambda path: path.symlink_to(path.with_name(path.name + ".was").rename(path.parent.parent / "secret")),
    "folder": lambda path: path.mkdir(),
    "sparse": sparse,
    "sparse copy": sparse_copy,
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", [OWNER, RANK, MANIFEST])
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES.keys())
def test_only_regular_files_in_the_folder_are_read(victim: Path, name: str, place: Any) -> None:
    (victim / name).rename(victim / f"{name}.was")
    place(victim / name)
    assert name in refusal_of(victim)
    if name != MANIFEST:
        restate(victim / name, hashed=False)
        assert name in refusal_of(victim)
        with pytest.raises(CheckpointError, match=name):
            CheckpointReader(victim).verify()


@pytest.mark.parametrize("link", ["itself", "fifo", "nul", "long"])
def test_a_folder_that_is_none_is_refused(tmp_path: Path, link: str) -> None:
    directory = tmp_path / {"nul": "a\0b", "long": "x" * 5000}.get(link, "step-000030")
    if link == "itself":
        directory.symlink_to(directory)
    elif link == "fifo":
        os.mkfifo(directory)
    with pytest.raises(CheckpointError) as caught:
        CheckpointReader(directory)
    require_one_line(caught.value)


# ---- the manifest


def digest_of(described: Any) -> str:
    """The content digest as the manifest's docstring has it, where there is enough to compute it from."""
    parts = sorted(
        (c["param"], c["kind"], c["start"], c["stop"], c["dtype"], c["sha256"])
        for entry in described["owner_files"]
        for c in entry["content"].values()
    )
    layout = check_record(described["spec"]["layout"], rayzero.layout.model_layout.ModelLayout)
    slices = [
        [unit.name, slot.name, *part[1:]] for unit in layout.units for slot in unit.slots for part in parts
        if part[0] == slot.name
    ]  # fmt: skip
    content = {
        "step": described["step"], "hyper": described["hyper"], "slot_steps": described["steps"],
        "layout": layout.digest, "slices": slices,
    }  # fmt: skip
    return hashlib.sha256(canonical_json(content).encode()).hexdigest()


def put(directory: Path, described: dict[str, Any]) -> None:
    """Write a manifest with the hashes that it should have."""
    described = json.loads(json.dumps(described))  # a change in what another one has put there may have left other keys
    described.pop("sha256", None)
    try:
        described["digest"] = digest_of(described)
    except Exception:  # whatever is wrong with it, it has no digest
        described["digest"] = described.get("digest", "")
    digest = hashlib.sha256(canonical_json(described).encode()).hexdigest()
    (directory / MANIFEST).write_text(json.dumps(described | {"sha256": digest}))


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON value."""
    if path:
        yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        yield from places(one, (*path, key))


ODD: list[Any] = [
    None, True, False, 0, 1, -1, 2, 128, 2**31, 2**62, 2**63, 2**64, -(2**63), 10**300, 0.5, -0.0, float("nan"),
    float("inf"), "", "w", "master", "compute", "float32", "int64", "complex64", "F32", "\0", "a\0b", "\n", "\ud800",
    "../../etc/passwd", "/etc/passwd", "x" * 10000, "f" * 64, [], [[]], [None], [0], [-1], [2**62], [2**31, 2**31],
    [1] * 1000, ["a", "b"], {}, {"": None}, {"a": {"b": []}},
]  # fmt: skip


def test_the_digest_is_computed_here_as_it_is_there(victim: Path) -> None:
    described = json.loads((victim / MANIFEST).read_text())
    assert digest_of(described) == described["digest"]


@pytest.mark.timeout(600)
@settings(max_examples=settings.default.max_examples * 4, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_manifest_with_odd_values_is_refused_or_harmless(whole: Path, tmp_path: Path, data: Any) -> None:
    directory = tmp_path / whole.name
    if not directory.exists():
        shutil.copytree(whole, directory)
    described = json.loads((whole / MANIFEST).read_text())
    everywhere = list(places(described))
    for _ in range(data.draw(st.integers(1, 2))):
        # draw depth first: most places are in the files' contents
        depth = data.draw(st.integers(1, 6))
        path = data.draw(st.sampled_from([p for p in everywhere if len(p) == depth] or everywhere))
        change_at(described, path, data)
    put(directory, described)
    try:
        read_all(directory)
        CheckpointReader(directory).verify()
        export_full(directory, tmp_path / "out.safetensors", overwrite=True)
    except CheckpointError as error:
        require_one_line(error)


def change_at(described: Any, path: tuple[Any, ...], data: Any) -> None:
    try:
        for key in path[:-1]:
            described = described[key]
        how = data.draw(st.sampled_from(["replace", "replace", "replace", "remove", "double"]))
        if how == "remove":
            del described[path[-1]]
        elif how == "double" and isinstance(described, list):
            described.append(copy.deepcopy(described[path[-1]]))
        else:
            described[path[-1]] = copy.deepcopy(data.draw(st.sampled_from(ODD)))
    except (KeyError, IndexError, TypeError):
        pass  # the first change took this place away


def many_rank_files(described: dict[str, Any]) -> None:
    entry = described["rank_files"][0]
    more = entry | {"content": {}}
    described["rank_files"] = [entry] + [more | {"name": rank_file_name(rank)} for rank in range(1, 100_000)]
    described["spec"]["world_size"] = 100_000


def the_same_rank_file(described: dict[str, Any]) -> None:
    described["rank_files"] *= 10_000


def huge_parameter(described: dict[str, Any]) -> None:
    described["spec"]["layout"]["units"][1]["params"][0][1] = [1 << 40]
    described["spec"]["layout"]["shard_numel"] = 64


def long_piece(described: dict[str, Any]) -> None:
    for content in described["owner_files"][0]["content"].values():
        content["stop"] = 1 << 62


def rename_file(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda described: described["owner_files"][0].update(name=name)


MANIFESTS: dict[str, Callable[[dict[str, Any]], None]] = {
    "rank files": many_rank_files,
    "one rank file": the_same_rank_file,
    "parameter": huge_parameter,
    "piece": long_piece,
    "absolute": rename_file("/etc/hostname"),
    "above": rename_file("../owner-000.safetensors"),
    "below": rename_file("x/owner-000.safetensors"),
    "nul": rename_file("owner-000.safetensors\0"),
    "itself": rename_file("manifest.json"),
    "of an owner that there is not": rename_file("owner-001.safetensors"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("change", MANIFESTS.values(), ids=MANIFESTS.keys())
def test_a_hostile_manifest_is_refused_at_once(victim: Path, change: Callable[[dict[str, Any]], None]) -> None:
    described = json.loads((victim / MANIFEST).read_text())
    change(described)
    put(victim, described)
    refusal_of(victim)


@pytest.mark.parametrize("depth", [400, 900, 5_000, 1_000_000])
def test_a_manifest_nested_deeply_is_refused(victim: Path, depth: int) -> None:
    text = (victim / MANIFEST).read_text()
    (victim / MANIFEST).write_text(text.replace('"step": 30', f'"step": {"[" * depth}{"]" * depth}', 1))
    refusal_of(victim)
    (victim / MANIFEST).write_text("[" * depth)
    refusal_of(victim)


def test_a_manifest_of_thousands_of_parameters_is_read_in_time_that_grows_with_it(tmp_path: Path) -> None:
    """Looking for the kinds of a parameter among all pieces took minutes."""
    from rayzero.layout.model_layout import ModelLayout, lay_out_unit

    params = [(f"p{number}", (1,)) for number in range(5_000)]
    layout = ModelLayout(units=(lay_out_unit(0, "", torch.float32, True, params),), shard_numel=1 << 21)
    content = {
        f"{name}/{MASTER}/0": {
            "param": name, "kind": MASTER, "start": 0, "stop": 1, "shape": [1], "dtype": "float32", "sha256": "0" * 64,
        } for name, _ in params
    }  # fmt: skip
    spec = Written(layout, {}).spec
    entry = rayzero.protocol.messages.FileEntry(name=OWNER, size_bytes=8, sha256="0" * 64, content=content)
    rank = rayzero.protocol.messages.FileEntry(name=RANK, size_bytes=8, sha256="0" * 64)
    manifest = Manifest(step=1, spec=spec, hyper=(), slot_steps={}, owner_files=(entry,), rank_files=(rank,))
    assert Manifest.from_json(manifest.to_json(), "here").digest == manifest.digest


# ---- a run that resumes from one


def generator_of(header: dict[str, Any]) -> str:
    """The tensor of torch's generator."""
    return next(name for name in header if name.startswith("state/") and name.endswith(".rng.torch"))


def without(key: str, value: Any, header: dict[str, Any]) -> str:
    """A rank's state with something else in place of ``key``."""
    return json.dumps(json.loads(header["__metadata__"]["state"]) | {key: value})


@pytest.mark.parametrize(
    "change",
    [
        lambda h: h["__metadata__"].update(state="{}"),
        lambda h: h["__metadata__"].update(state=without("rng", {"numpy": [1, 2], "python": [3, None]}, h)),
        lambda h: h["__metadata__"].update(state=without("rng", [], h)),
        lambda h: h["__metadata__"].update(state=without("loop_state", 7, h)),
        lambda h: h["__metadata__"].update(state=without("loop_state", {"~tensor": "nowhere"}, h)),
        lambda h: h["__metadata__"].update(state='{"loop_state": ' + '{"a": ' * 900 + "1" + "}" * 901),
        lambda h: h["__metadata__"].update(state=without("groups", None, h)),
        lambda h: h["__metadata__"].update(state=without("groups", [7], h)),
        lambda h: h["__metadata__"].update(state=without("groups", [{"params": 3, "options": []}], h)),
        lambda h: h[generator_of(h)].update(dtype="I8"),
        lambda h: h.update({"state/other": h.pop(generator_of(h))}),
    ],
)
def test_a_rank_state_that_is_none_is_refused_at_resume(tmp_path: Path, change: Any) -> None:
    with running_in(RankContext()):
        model = mlp()
        optimizer = prepared(model)
        one_step(model, optimizer)
        rayzero.save_checkpoint(optimizer, tmp_path / "ck", {})
    path = tmp_path / "ck" / RANK
    rewrite_header(path, change)
    header = json.loads(path.read_bytes()[8 : header_bytes(path)])

    def restate_content(described: dict[str, Any]) -> None:
        content = described["rank_files"][0]["content"]
        first = next(iter(content.values()))
        names = {"U8": "uint8", "I8": "int8"}
        described["rank_files"][0]["content"] = {
            name: first | {"shape": one["shape"], "dtype": names[one["dtype"]]}
            for name, one in header.items()
            if name != "__metadata__"
        }

    edit_manifest(tmp_path / "ck", restate_content)
    before = torch.get_rng_state()
    with running_in(RankContext(resume=tmp_path / "ck")), pytest.raises(CheckpointError, match=RANK) as caught:
        prepared(mlp())
    require_one_line(caught.value)
    torch.set_rng_state(before)
