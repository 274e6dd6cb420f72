"""A checkpoint under other names: those that transformers publishes, or those of its models' parameters. A config.json
of transformers says of which model: it is made without memory. What is written gets that config, too."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rayzero.convert.formats.content import Content, Param, Reader, WeightDecl
from rayzero.convert.translation import Translation, from_model, no_values, to_model
from rayzero.errors import CheckpointError
from rayzero.files import parse_json, read_text

CONFIG_FILE = "config.json"
_MAX_CONFIG = 1 << 24  # bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """A source with the names that a conversion writes."""

    reader: Reader
    says: str  # whose names they are and why, in words; "": those of the source, and there was no choice
    settings: Mapping[str, Any] | None = None  # transformers' config of the model; None: none is known
    architecture: str = ""  # the model's class

    def config(self, dtype: torch.dtype | None) -> str | None:
        """The text of the config for what is written, with floating-point parameters in ``dtype``, or as they are if
        that is None. None if no config is known."""
        if self.settings is None:
            return None
        dtypes = [param.decl.torch_dtype(name) for name, param in self.reader.content.params.items()]
        floats = [found for found in dtypes if found.is_floating_point]
        widest = functools.reduce(torch.promote_types, floats) if floats else torch.float32
        named = str(dtype or widest).removeprefix("torch.")  # ``from_pretrained`` makes the model in the dtype it names
        kept = {
            key: value for key, value in self.settings.items() if key != "torch_dtype"
        }  # what older versions call it
        said = {"architectures": [self.architecture], "dtype": named}
        return json.dumps(kept | said, indent=2, sort_keys=True) + "\n"


def published(reader: Reader, config: Path | None) -> Named:
    """A source with the names of a model's parameters, for ``from_pretrained``: with the names that transformers
    publishes, if ``config`` is of a model with these parameters.

    Raises CheckpointError or UnsupportedError if transformers' mapping cannot be followed, or would not bring the same
    values back."""
    settings, why = _settings(config)
    if config is None:
        why = f"under their own names, because no {CONFIG_FILE} is beside it: --config FILE gives the published ones"
    if config is None or settings is None:
        return Named(reader=reader, says=why)
    decls = reader.content.decls
    for model in models_of(config, settings):
        if _fits(model, decls):
            made = from_model(model, decls, reader.weight, reader)
            _require_same(model, made, decls, reader)
            name = type(model).__name__
            return Named(
                reader=TranslatedReader(reader, made), says=f"with the names that transformers publishes for {name}",
                settings=settings, architecture=name,
            )  # fmt: skip
    return Named(reader=reader, says=f"under their own names, because {config} is of no model that has them")


def unpublished(reader: Reader, config: Path | None) -> Named:
    """A source with published names, for what is resumed or loaded into a model: with the names of its parameters, if
    ``config`` is known and these tensors are all that one of its models needs. Raises as ``published``."""
    settings, why = _settings(config)
    if config is None or settings is None:
        return Named(reader=reader, says=why)
    for model in models_of(config, settings):
        made = to_model(model, model.state_dict().keys(), reader.content.decls, reader.weight, reader)
        if _fits(model, made.decls):
            tied = {alias: name for alias, name in model.all_tied_weights_keys.items() if alias not in made.decls}
            name = type(model).__name__
            return Named(reader=TranslatedReader(reader, made, tied), says=f"with the names of {name}'s parameters")
    return Named(reader=reader, says=f"under their own names, because they do not fit a model of {config}")


def as_published(reader: Reader, config: Path | None) -> Named:
    """A source whose names are published ones already, with its config."""
    settings, why = _settings(config)
    architectures = (settings or {}).get("architectures") or [""]
    return Named(reader=reader, says=why, settings=settings, architecture=str(architectures[0]))


class TranslatedReader(Reader):
    """A reader's weights under other names. It has no optimizer states."""

    def __init__(self, reader: Reader, made: Translation, tied: Mapping[str, str] | None = None) -> None:
        super().__init__(reader)
        self._made = made
        before = reader.content
        held = {name: decl for name, decl in made.decls.items() if math.prod(decl.shape)}
        buffers = {name: decl for name, decl in held.items() if made.elements[name].locate(0)[0] in before.buffers}
        self.content = Content(
            params={name: Param(decl=decl) for name, decl in made.decls.items() if name not in buffers},
            buffers=buffers,
            tied=tied or {},
            step=before.step,
        )

    def read(self, name: str, kind: str, start: int, stop: int) -> Tensor:
        return self._made.elements[name].read(start, stop)


def _settings(config: Path | None) -> tuple[dict[str, Any] | None, str]:
    """A config of transformers, or why there is none that counts."""
    settings = None if config is None else read_config(config)
    if settings is not None and find_spec("transformers") is None:
        return None, f"under their own names, because transformers, which {config} is of, is not installed"
    return settings, ""


def _fits(model: Any, decls: Mapping[str, WeightDecl]) -> bool:
    """Whether tensors are those of a model, of tied ones at least one name."""
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    lacking = shapes.keys() - decls.keys() - model.all_tied_weights_keys.keys()
    return not lacking and all(shapes.get(name) == decl.shape for name, decl in decls.items())


def _require_same(model: Any, made: Translation, decls: Mapping[str, WeightDecl], source: object) -> None:
    """Raise CheckpointError unless what is published comes back: of each tensor, some elements are followed."""
    back = to_model(model, model.state_dict().keys(), made.decls, no_values, source)
    again = model.all_tied_weights_keys.keys() | set(model._keys_to_ignore_on_save or ())
    for name, decl in decls.items():
        numel = math.prod(decl.shape)
        if name in again or not numel:
            continue
        found = back.decls.get(name)
        places = {0, numel // 3, numel // 2, numel * 6 // 7, numel - 1}
        if (
            found is None
            or found.shape != decl.shape
            or any(
                made.elements[there[0]].locate(there[1]) != (name, place)
                for place in places
                for there in (back.elements[name].locate(place),)
            )
        ):
            raise CheckpointError(
                f"{source}: transformers publishes {name!r} of {type(model).__name__} in a form that it would not read "
                "as the same values; move its config.json away to keep the model's own names"
            )


# ---- configs ----------------------------------------------------------------------------------------------------


def find_config(checkpoint: Path) -> Path | None:
    """The config beside a checkpoint: in its folder, or in one of the two above, of which one may be a run's."""
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
