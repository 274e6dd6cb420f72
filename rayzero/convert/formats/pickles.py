"""Reads the pickles of other systems without running what they ask for.

A pickle is a program: it may import any module and call any function. Here it may only name what its format needs, all
of which makes plain values; the first other name refuses the file.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.serialization import _get_layout, get_unsafe_globals_in_checkpoint, safe_globals

from rayzero.convert.formats.content import damaged
from rayzero.errors import CheckpointError, UnsupportedError
from rayzero.files import open_regular

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

_MAX_METADATA = 1 << 30  # bytes: some ten million chunks of tensors

METADATA_FILE = ".metadata"  # of a DCP folder
_DCP = "torch.distributed.checkpoint"


@cache
def _metadata_names() -> Mapping[tuple[str, str], Any]:
    """(module, name) -> what a DCP folder's metadata may name. Imports DCP, which takes half a second of CPU time."""
    from torch.distributed.checkpoint import metadata
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    classes = (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    )
    return {
        **{(f"{_DCP}.metadata", name): getattr(metadata, name) for name in classes},
        (f"{_DCP}.filesystem", "_StorageInfo"): _StorageInfo,
        ("torch", "Size"): torch.Size,
        ("torch.serialization", "_get_layout"): _get_layout,
        ("collections", "OrderedDict"): OrderedDict,
        ("pathlib", "PosixPath"): PurePosixPath,  # where it was written; Python 3.13 has it in another module
        ("pathlib._local", "PosixPath"): PurePosixPath,
    }


class _MetadataUnpickler(pickle.Unpickler):
    """Knows the names that DCP's metadata needs, and dtypes."""

    def find_class(self, module: str, name: str) -> Any:
        found = _metadata_names().get((module, name))
        if found is None and module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            found = dtype
        if found is None:
            raise UnsupportedError(f"it needs {module}.{name}, which no DCP metadata needs; it is not run")
        return found


def read_dcp_metadata(path: Path) -> Metadata:
    """The metadata of a DCP folder. Its fields may still be anything. Raises UnsupportedError that names a class or
    function which DCP's metadata does not need, CheckpointError if the file is missing, too large or damaged."""
    try:
        with open_regular(path) as file:
            text = file.read(_MAX_METADATA + 1)
        if len(text) > _MAX_METADATA:
            raise CheckpointError(f"{path} has more than {_MAX_METADATA:,} bytes, which no DCP metadata needs")
        found = _MetadataUnpickler(io.BytesIO(text)).load()
    except OSError as exc:
        raise CheckpointError(f"{path} cannot be read: {exc.strerror or exc}") from exc
    except UnsupportedError as exc:
        raise UnsupportedError(f"{path} is refused: {exc}") from None
    except CheckpointError:
        raise
    except Exception as exc:  # a damaged pickle raises anything
        raise damaged(path, repr(exc)) from exc
    wanted = _metadata_names()[f"{_DCP}.metadata", "Metadata"]
    if not isinstance(found, wanted):
        raise damaged(path, f"it holds a {type(found).__name__}, not DCP metadata")
    return cast("Metadata", found)


class _Inert:
    """Stands for an object of DeepSpeed that no value is taken from. Takes any arguments and state."""

    def __init__(self, *args: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass


_DEEPSPEED_NAMES: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
    (_Inert, f"deepspeed.{name}")
    for name in (
        "runtime.zero.config.ZeroStageEnum",
        "runtime.fp16.loss_scaler.LossScaler",
        "runtime.fp16.loss_scaler.LossScalerBase",
        "runtime.fp16.loss_scaler.DynamicLossScaler",
        "utils.tensor_fragment.fragment_address",
    )
]


def load_torch_file(path: Path) -> Any:
    """What ``torch.save`` wrote to ``path``: tensors, views of the mapped file, and plain values.

    Loads weights only: objects of DeepSpeed that its own checkpoints contain (loss scaler, stage, slice addresses) come
    back empty, and any other class or function raises UnsupportedError that names it. Raises CheckpointError if the
    file is missing or damaged."""
    try:
        open_regular(path).close()
    except OSError as exc:
        raise CheckpointError(f"{path} cannot be read: {exc.strerror or exc}") from exc
    return load_torch(path, path)


def require_dense(value: Any, where: object) -> Tensor:
    """``value``, if it is a dense tensor whose memory is as large as its shape says: a view may repeat one element any
    number of times. Raises CheckpointError otherwise."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided or value.is_meta or value.is_quantized:
        raise damaged(where, f"it holds a {type(value).__name__}, not a dense tensor")
    if value.untyped_storage().nbytes() < value.numel() * value.itemsize:
        raise damaged(where, f"it holds {value.untyped_storage().nbytes():,} bytes for the shape {tuple(value.shape)}")
    return value.detach()


def load_torch(source: Path | io.BytesIO, where: object) -> Any:
    """As ``load_torch_file``, of a regular file or of memory. ``where``: its place, for messages."""
    if not zipfile.is_zipfile(source):
        raise damaged(where, "it is not in torch's zip format; it is cut short, or older than torch 1.6")
    if isinstance(source, io.BytesIO):
        source.seek(0)
    try:
        with safe_globals(_DEEPSPEED_NAMES):
            return torch.load(source, map_location="cpu", mmap=isinstance(source, Path), weights_only=True)
    except pickle.UnpicklingError as exc:
        raise _unsafe(source, where) or damaged(where, exc) from exc
    except Exception as exc:  # a damaged archive raises anything
        raise damaged(where, repr(exc)) from exc


def _unsafe(source: Path | io.BytesIO, where: object) -> UnsupportedError | None:
    """The refusal that names what the source wants to run; None if it names nothing."""
    if isinstance(source, io.BytesIO):
        source.seek(0)
    with safe_globals(_DEEPSPEED_NAMES):
        try:
            names = get_unsafe_globals_in_checkpoint(source)
        except Exception:  # damaged: the caller says so
            return None
    if not names:
        return None
    return UnsupportedError(
        f"{where} is refused: it needs {', '.join(sorted(names)[:3])}, and only tensors and plain values are loaded; "
        "save it again without such objects (client_state, lr_scheduler)"
    )
