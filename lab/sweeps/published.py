"""Checkpoints that transformers publishes, in and out: each architecture with a small config, its values compared."""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
from torch import Tensor
from transformers.models.auto import modeling_auto

import rayzero
from rayzero.convert.conversion import convert
from rayzero.errors import RayZeroError

from .tiny_configs import tiny_config
from .trial import NOT_TRIED, REFUSED, SAME, WRONG, Case, Outcome

TITLE = "Published checkpoints that were tried"
INTRO = """
transformers publishes weights under other names, and in other pieces, than its models have them. Each row is one
model class with a small config and random values. transformers saves it, in several files, and
`prepare(weights=FOLDER)` starts another one, whose parameters have no memory, from that folder. Its RayZero
checkpoint is converted with `rayzero convert --to hf`, and `from_pretrained` reads the result. "same" says that every
parameter and persistent buffer has the same bits both times, and that `from_pretrained` found nothing missing or left
over. The last column names what transformers does to the tensors on their way. "not tried" says why plain
transformers cannot do it here.
"""
PACKAGES = ["transformers", "torch"]

_HEADS = ("_FOR_CAUSAL_LM", "_FOR_MULTIMODAL_LM", "_FOR_SEQ_TO_SEQ_CAUSAL_LM", "_FOR_IMAGE_CLASSIFICATION",
          "_FOR_OBJECT_DETECTION", "_FOR_UNIVERSAL_SEGMENTATION")  # fmt: skip
_USED = (
    "torch._dynamo", "rayzero.engine.prepare", "rayzero.engine.checkpoint", "rayzero.store.inprocess",
    "transformers.models.mixtral.modeling_mixtral", "transformers.models.llava.modeling_llava",
    "transformers.models.vit.modeling_vit", "transformers.models.detr.modeling_detr",
)  # fmt: skip


def cases() -> Iterator[Case]:
    """Every model class of these kinds, once."""
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    for module in _USED:  # once, not in each case's process
        importlib.import_module(module)
    for name in _classes():
        yield Case(name, partial(_there_and_back, name))


def _classes() -> list[str]:
    """Every class with a head of these kinds, and the base models of all types that have none."""
    types: set[str] = set()
    names: dict[str, None] = {}
    for kind in (*_HEADS, ""):
        found = getattr(modeling_auto, f"MODEL{kind}_MAPPING_NAMES")
        for model_type, classes in found.items():
            if kind or model_type not in types:
                names |= dict.fromkeys([classes] if isinstance(classes, str) else classes)
        types |= found.keys()
    return list(names)


def _there_and_back(name: str) -> Outcome:
    try:
        model_class = getattr(transformers, name)
        config = tiny_config(model_class)
        model = _filled(model_class(deepcopy(config)))  # saving a model changes its config
    except Exception as exc:
        return Outcome(NOT_TRIED, f"no small config was found: {type(exc).__name__}: {exc}")
    expected = {key: value.detach().clone() for key, value in model.state_dict().items()}
    with tempfile.TemporaryDirectory() as place:
        theirs, ours = Path(place, "theirs"), Path(place, "ours")
        try:
            model.save_pretrained(theirs, max_shard_size="200KB")
            plain = _read(model_class, theirs)
        except Exception as exc:
            return Outcome(NOT_TRIED, f"transformers does not save and load it: {type(exc).__name__}: {exc}")
        if wrong := _difference(plain, expected):
            return Outcome(NOT_TRIED, f"transformers does not read what it saved: {wrong}")
        try:
            found = _through(model_class, config, theirs, ours)
        except RayZeroError as exc:
            return Outcome(REFUSED, str(exc))
        if wrong := _difference(found, expected):
            return Outcome(WRONG, f"on the way in: {wrong}")
        if wrong := _difference(_read(model_class, ours / "hf"), expected):
            return Outcome(WRONG, f"on the way out: {wrong}")
    return Outcome(SAME, _operations(model))


def _filled(model: Any) -> Any:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.rand(param.shape, generator=generator) - 0.5)
        for buffer in model.buffers():
            if buffer.is_floating_point():
                buffer.copy_(torch.rand(buffer.shape, generator=generator))
    return model


def _through(model_class: Any, config: Any, published: Path, ours: Path) -> dict[str, Tensor]:
    """Start a model from the published folder, and write its checkpoint, converted, as ``ours/hf``; its values."""
    with rayzero.empty_parameters():
        model = model_class(deepcopy(config))
    trained = [param for param in model.parameters() if param.requires_grad]
    model, optimizer = rayzero.prepare(model, torch.optim.SGD(trained, lr=0.1), weights=published)
    rayzero.save_checkpoint(optimizer, ours / "step-000000")
    (ours / "config.json").write_bytes((published / "config.json").read_bytes())
    convert(ours / "step-000000", ours / "hf", max_bytes=200_000)
    return rayzero.full_state_dict(model)


def _read(model_class: Any, folder: Path) -> dict[str, Tensor]:
    if not (folder / "config.json").is_file():
        raise RuntimeError("no config.json was written")
    model, said = model_class.from_pretrained(folder, output_loading_info=True)
    wrong = {key: sorted(map(str, found))[:3] for key, found in said.items() if found}
    if wrong:
        raise RuntimeError(f"from_pretrained says {wrong}")
    return dict(model.state_dict())


def _difference(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> str:
    """What differs first; "" if nothing does."""
    if found.keys() != expected.keys():
        return f"the names {sorted(found.keys() ^ expected.keys())[:3]}"
    for name, value in expected.items():
        if found[name].dtype != value.dtype or not torch.equal(found[name], value):
            return f"{name} has other values"
    return ""


def _operations(model: Any) -> str:
    """What transformers does to the tensors of a model, in its own words."""
    mapping = transformers.conversion_mapping.get_model_conversion_mapping(model, add_legacy=False)
    names = {type(op).__name__: None for entry in mapping for op in getattr(entry, "operations", ())}
    renamed = ["renamed"] if any(not hasattr(entry, "operations") for entry in mapping) else []
    return ", ".join([*renamed, *names]) or "nothing"
