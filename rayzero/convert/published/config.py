"""The model that a ``config.json`` of transformers describes, without memory, and that config for what is written."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from rayzero.errors import CheckpointError
from rayzero.files import parse_json, read_text

CONFIG_FILE = "config.json"
_MAX_CONFIG = 1 << 24  # bytes


def find_config(checkpoint: Path) -> Path | None:
    """The config beside a checkpoint: in its folder, or in one of the two above (a run's has its checkpoints' folder
    between)."""
    folder = checkpoint if checkpoint.is_dir() else checkpoint.parent
    above = folder.absolute().parents
    return next((file for at in (folder, *above[:2]) if (file := at / CONFIG_FILE).is_file()), None)


def read_config(path: Path) -> dict[str, Any] | None:
    """A config's settings; None if it is not of transformers. Raises CheckpointError if it is no JSON."""
    try:
        settings = parse_json(read_text(path, at_most=_MAX_CONFIG))
    except (ValueError, OSError) as exc:
        raise CheckpointError(f"{path} cannot be read: {' '.join(str(exc).split())[:300]}") from exc
    return settings if isinstance(settings, dict) and isinstance(settings.get("model_type"), str) else None


def models_of(path: Path, settings: Mapping[str, Any]) -> Iterator[Any]:
    """The models of transformers that a config may be of, on the meta device, the ones that it names first. None if
    the code of its model is not in transformers: no other code is run.

    Raises CheckpointError if the config makes none."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if "auto_map" in settings or settings["model_type"] not in CONFIG_MAPPING:
        return
    failed: Exception | None = None
    made = 0
    try:
        config = CONFIG_MAPPING[settings["model_type"]].from_pretrained(path, local_files_only=True)
    except Exception as exc:  # a config may hold anything
        raise _makes_none(path, exc) from exc
    for kind in _classes(settings, type(config)):
        try:
            with torch.device("meta"):
                model: Any = kind(config)
        except Exception as exc:  # a class may ask for what another one of the same model does not need
            failed = failed or exc
            continue
        made += 1
        yield model
    if failed is not None and not made:
        raise _makes_none(path, failed) from failed


def _makes_none(path: Path, exc: Exception) -> CheckpointError:
    why = " ".join(str(exc).split())[:300]
    return CheckpointError(f"{path} makes no model of transformers ({type(exc).__name__}: {why})")


def _classes(settings: Mapping[str, Any], config_class: type) -> Iterator[type]:
    import transformers
    from transformers.models.auto import modeling_auto

    seen: set[type] = set()

    def new(found: Any) -> Iterator[type]:
        for kind in found if isinstance(found, tuple | list) else (found,):
            of_models = isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)
            if of_models and kind not in seen and kind.config_class is config_class:
                seen.add(kind)
                yield kind

    for name in settings.get("architectures") or ():
        yield from new(getattr(transformers, str(name), None))
    for name, auto in vars(modeling_auto).items():
        mapping = getattr(auto, "_model_mapping", None) if name.startswith("AutoModel") else None
        if mapping is not None and config_class in mapping:
            yield from new(mapping[config_class])


def written_config(settings: Mapping[str, Any], architecture: str, dtype: torch.dtype) -> str:
    """The config as text, for weights of that dtype: ``from_pretrained`` makes the model in the dtype it names."""
    said = {"architectures": [architecture], "dtype": str(dtype).removeprefix("torch.")}
    kept = {key: value for key, value in settings.items() if key != "torch_dtype"}  # what older versions call it
    return json.dumps(kept | said, indent=2, sort_keys=True) + "\n"
