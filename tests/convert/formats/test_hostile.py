"""Sources that are damaged or made to harm: refused by one line that names what is wrong, and nothing is written."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex

from rayzero.convert.conversion import convert
from rayzero.convert.formats.content import WEIGHT
from rayzero.convert.formats.dcp_reader import is_tiling
from rayzero.convert.formats.pickles import load_torch_file
from rayzero.errors import ConfigError

from .foreign import SHAPES, TWO, States, refusal_of, write_grid, write_hf, write_zero
from .real_deepspeed import TAG, unpack


def universal(tmp_path: Path) -> Path:
    """A folder that DeepSpeed's ds_to_universal made of one of stage 1."""
    return unpack(tmp_path) / "zero1-universal" / TAG


class Harmful:
    """Makes a folder, if its pickle is run."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.system, (f"mkdir {self.target}",)


# ---- pickles ----------------------------------------------------------------------------------------------------


def in_dcp_metadata(tmp_path: Path, states: States, harm: Harmful) -> Path:
    folder = write_grid(tmp_path / "dcp", states.of(WEIGHT), 1)
    (folder / ".metadata").write_bytes(pickle.dumps(harm))
    return folder


def in_a_dcp_chunk(tmp_path: Path, states: States, harm: Harmful) -> Path:
    folder = write_grid(tmp_path / "dcp", states.of(WEIGHT), 1)
    torch.save(harm, folder / "evil.distcp")
    size = (folder / "evil.distcp").stat().st_size
    edit_metadata(folder, lambda m: place(m, "w", (0, 0), _StorageInfo("evil.distcp", 0, size)))
    return folder


def in_deepspeeds(which: str, stage: int) -> Callable[[Path, States, Harmful], Path]:
    def write(tmp_path: Path, states: States, harm: Harmful) -> Path:
        folder = write_zero(tmp_path / "zero", states, stage, 2, TWO)
        torch.save({"client": harm}, sorted(folder.glob(f"*_{which}_states.pt"))[0])
        return folder

    return write


def in_a_universal_checkpoint(tmp_path: Path, states: States, harm: Harmful) -> Path:
    folder = universal(tmp_path)
    torch.save(harm, folder / "zero" / "up.weight" / "exp_avg.pt")
    return folder


PLACES: dict[str, Callable[[Path, States, Harmful], Path]] = {
    "DCP's metadata": in_dcp_metadata,
    "a DCP chunk": in_a_dcp_chunk,
    **{
        f"{which} states of stage {stage}": in_deepspeeds(which, stage)
        for which in ("optim", "model")
        for stage in (2, 3)
    },
    "a universal checkpoint": in_a_universal_checkpoint,
}


@pytest.mark.promise("safe", "checkpoints")
@pytest.mark.parametrize("where", PLACES)
def test_code_in_a_pickle_is_named_and_not_run(tmp_path: Path, states: States, where: str) -> None:
    folder = PLACES[where](tmp_path, states, Harmful(tmp_path / "owned"))
    assert "posix.system" in refusal_of(folder)
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize(
    "name", [("builtins", "eval"), ("torch", "load"), ("torch.serialization", "load"), ("os", "abc")]
)
def test_no_other_name_is_found_in_dcp_metadata(tmp_path: Path, states: States, name: tuple[str, str]) -> None:
    folder = write_grid(tmp_path / "dcp", states.of(WEIGHT), 1)
    (folder / ".metadata").write_bytes(b"c" + "\n".join([*name, "."]).encode())
    assert ".".join(name) in refusal_of(folder)


# ---- DCP --------------------------------------------------------------------------------------------------------


def edit_metadata(folder: Path, edit: Callable[[Any], None]) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    edit(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def place(metadata: Any, name: str, offsets: tuple[int, ...], info: _StorageInfo) -> None:
    metadata.storage_data[MetadataIndex(name, offsets)] = info


def w_in(metadata: Any) -> Any:
    return metadata.state_dict_metadata["w"]


FIRST = MetadataIndex("w", (0, 0))


LIES: dict[str, tuple[Callable[[Any], None], str]] = {
    "a chunk is missing": (lambda m: w_in(m).chunks.pop(), "the chunks of 'w' do not make up its shape"),
    "a chunk comes twice": (
        lambda m: w_in(m).chunks.append(w_in(m).chunks[0]),
        "the chunks of 'w' do not make up its shape",
    ),
    "a shape is larger": (
        lambda m: setattr(w_in(m), "size", torch.Size((17, 1 << 40))),
        "the chunks of 'w' do not make up its shape",
    ),
    "a dtype is another": (lambda m: setattr(w_in(m).properties, "dtype", torch.float16), "float32 of shape"),
    "a chunk has no place": (lambda m: m.storage_data.pop(FIRST), "does not say where 'w' at (0, 0) is"),
    "a chunk is compressed": (lambda m: setattr(m.storage_data[FIRST], "transform_descriptors", ["zstd"]), "zstd"),
    "no tensors": (lambda m: setattr(m, "state_dict_metadata", None), "lists no tensors"),
    "a file outside": (lambda m: place(m, "w", (0, 0), _StorageInfo("../x", 0, 5)), "outside its folder"),
    "an absolute file": (lambda m: place(m, "w", (0, 0), _StorageInfo("/etc/passwd", 0, 5)), "outside its folder"),
    "a missing file": (lambda m: place(m, "w", (0, 0), _StorageInfo("no.distcp", 0, 5)), "no.distcp"),
    "beyond the end": (lambda m: place(m, "w", (0, 0), _StorageInfo("__0_0.distcp", 1 << 40, 5)), "beyond the end"),
    "before the start": (lambda m: place(m, "w", (0, 0), _StorageInfo("__0_0.distcp", -8, 5)), "beyond the end"),
    "other bytes": (lambda m: place(m, "w", (0, 0), _StorageInfo("__0_0.distcp", 3, 50)), "damaged"),
}


@pytest.mark.parametrize("lie", LIES)
def test_dcp_metadata_that_lies(tmp_path: Path, states: States, lie: str) -> None:
    folder = write_grid(tmp_path / "dcp", states.of(WEIGHT), 2)
    edit, says = LIES[lie]
    edit_metadata(folder, edit)
    assert says in refusal_of(folder)


@pytest.mark.parametrize("keep", [0, 1, 100, -1])
@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp"])
def test_a_dcp_file_that_is_cut_short(tmp_path: Path, states: States, file: str, keep: int) -> None:
    folder = write_grid(tmp_path / "dcp", states.of(WEIGHT), 2)
    data = (folder / file).read_bytes()
    (folder / file).write_bytes(data[:keep])
    refusal_of(folder)


def test_a_tiling_is_a_grid_without_gaps() -> None:
    assert is_tiling((4, 3), [((0, 0), (2, 3)), ((2, 0), (2, 3))])
    assert is_tiling((), [((), ())])
    assert is_tiling((0, 3), [((0, 0), (0, 3))])
    assert is_tiling((2,), [((0,), (2,)), ((2,), (0,))])  # a rank may have nothing
    assert not is_tiling((4, 3), [((0, 0), (2, 3)), ((1, 0), (2, 3))])
    assert not is_tiling((4, 4), [((0, 0), (4, 2)), ((0, 2), (2, 2)), ((0, 2), (2, 2))])
    assert not is_tiling((4,), [((0,), (2,)), ((2,), (3,))])
    assert not is_tiling((4,), [((1,), (3,))])
    assert not is_tiling((4,), [((0, 0), (4, 1))])
    assert not is_tiling((4,), [])


# ---- DeepSpeed --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_missing_shard(tmp_path: Path, states: States, stage: int, rank: int) -> None:
    folder = write_zero(tmp_path / "zero", states, stage, 3, TWO)
    (folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").unlink()
    assert "all" in refusal_of(folder)


@pytest.mark.parametrize("stage", [2, 3])
def test_shapes_that_do_not_fit_the_partitions(tmp_path: Path, states: States, stage: int) -> None:
    folder = write_zero(tmp_path / "zero", states, stage, 2, TWO)
    path = sorted(folder.glob("*_model_states.pt"))[0]
    model = torch.load(path, weights_only=True)
    model["param_shapes"][0]["embed.weight"] = torch.Size((100, 30))
    torch.save(model, path)
    says = refusal_of(folder)
    assert says.startswith(f"{folder}: ")
    assert "its parameters need" in says


@pytest.mark.parametrize("stage", [2, 3])
def test_a_moment_that_is_too_short(tmp_path: Path, states: States, stage: int) -> None:
    folder = write_zero(tmp_path / "zero", states, stage, 2, TWO)
    path = folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    shard = load_torch_file(path)
    shard["optimizer_state_dict"]["loss_scaler"] = None
    inner = (
        shard["optimizer_state_dict"].get("optimizer_state_dict")
        or shard["optimizer_state_dict"]["base_optimizer_state"]
    )
    inner["state"][0]["exp_avg"] = inner["state"][0]["exp_avg"][:5].clone()
    torch.save(shard, tmp_path / "shorter")  # the old file is still mapped
    (tmp_path / "shorter").replace(path)
    assert "5 elements of 'exp_avg'" in refusal_of(folder)
    assert convert(folder, tmp_path / "hf", to="hf", weights_only=True).content.params.keys() == SHAPES.keys()


@pytest.mark.parametrize("keep", [0, 100, -100])
@pytest.mark.parametrize("which", ["zero_pp_rank_1_mp_rank_00_optim_states.pt", "mp_rank_00_model_states.pt"])
def test_a_deepspeed_file_that_is_cut_short(tmp_path: Path, states: States, which: str, keep: int) -> None:
    folder = write_zero(tmp_path / "zero", states, 2, 2, TWO)
    (folder / which).write_bytes((folder / which).read_bytes()[:keep])
    assert which in refusal_of(folder)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("zero_pp_rank_0_mp_rank_01_optim_states.pt", "tensor parallelism"),
        ("layer_00-model_00-model_states.pt", "pipeline parallelism"),
    ],
)
def test_other_parallelism_is_refused_by_name(tmp_path: Path, states: States, name: str, says: str) -> None:
    folder = write_zero(tmp_path / "zero", states, 1, 2, TWO)
    (folder / name).write_bytes(b"")
    assert says in refusal_of(folder)


def test_deepspeeds_latest_leads_to_a_folder_beside_it_and_nowhere_else(tmp_path: Path, states: States) -> None:
    write_zero(tmp_path / "run" / "global_step30", states, 3, 2, TWO)
    (tmp_path / "run" / "latest").write_text("global_step30\n")
    assert convert(tmp_path / "run", tmp_path / "hf", to="hf").content.step == 30
    for tag in ("../run/global_step30", "..", "", "gone"):
        (tmp_path / "run" / "latest").write_text(tag)
        assert "no folder beside it" in refusal_of(tmp_path / "run")


def test_a_universal_state_of_another_shape(tmp_path: Path) -> None:
    folder = universal(tmp_path)
    torch.save({"param": torch.zeros(3)}, folder / "zero" / "up.weight" / "exp_avg.pt")
    assert "'exp_avg' of 'up.weight' is float32 of shape (3,)" in refusal_of(folder)


def repeated(shape: tuple[int, ...]) -> torch.Tensor:
    """A view that says it is large, of one element."""
    return torch.zeros(1).expand(shape)


@pytest.mark.parametrize(
    "lie", [repeated((17, 1 << 40)), torch.eye(17).to_sparse(), torch.empty(17, 19, device="meta"), 3]
)
def test_a_tensor_that_is_not_what_it_says(tmp_path: Path, lie: Any) -> None:
    folder = universal(tmp_path)
    torch.save({"param": lie}, folder / "zero" / "up.weight" / "fp32.pt")
    assert "fp32.pt is damaged" in refusal_of(folder)


@pytest.mark.parametrize("field", ["param_shapes", "module", "shared_params", "buffer_names", "global_steps"])
@pytest.mark.parametrize("lie", [7, "text", [[3]], {"w": {"w": 1}}])
def test_a_field_that_holds_anything(tmp_path: Path, states: States, field: str, lie: Any) -> None:
    folder = write_zero(tmp_path / "zero", states, 3, 2, TWO)
    path = folder / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    model = torch.load(path, weights_only=True)
    torch.save(model | {field: lie}, path)
    if (field, lie) != ("global_steps", 7):
        refusal_of(folder)


def test_moments_without_a_step_count(tmp_path: Path) -> None:
    folder = universal(tmp_path)
    (folder / "mp_rank_00_model_states.pt").unlink()
    (folder / "zero" / "up.weight" / "step.pt").unlink()
    assert "after how many steps" in refusal_of(folder)


# ---- safetensors, targets, arguments ----------------------------------------------------------------------------


def test_a_weight_that_no_master_can_hold(tmp_path: Path) -> None:
    doubles = States({("w", WEIGHT): torch.zeros(3, dtype=torch.float64)}, {})
    assert "'w' is float64" in refusal_of(write_hf(tmp_path / "hf", doubles))


def test_a_target_that_exists_stays(tmp_path: Path, states: States) -> None:
    source = write_hf(tmp_path / "hf", states)
    (tmp_path / "converted").mkdir()
    for to in ("hf", "dcp", "rayzero"):
        assert "exists" in refusal_of(source, to)


def test_a_disk_that_fills_up_leaves_nothing(tmp_path: Path, states: States, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_zero(tmp_path / "zero", states, 3, 2, TWO)

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    for to in ("hf", "dcp", "rayzero"):
        assert "No space left" in refusal_of(source, to)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"to": "gguf"}, "choose one of hf, dcp, rayzero"),
        ({"to": "rayzero", "dtype": torch.bfloat16}, "leave dtype out"),
        ({"to": "hf", "max_bytes": 0}, "larger size"),
    ],
)
def test_wrong_arguments(tmp_path: Path, states: States, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        convert(write_hf(tmp_path / "hf", states), tmp_path / "converted", **options)


def test_an_optimizer_whose_states_nobody_knows(tmp_path: Path, states: States) -> None:
    says = refusal_of(write_hf(tmp_path / "hf", states), optimizer="torch.optim.rmsprop:RMSprop")
    assert "start from the weights instead" in says
