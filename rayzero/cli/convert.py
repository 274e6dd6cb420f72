"""``rayzero convert`` and ``rayzero export``: checkpoints as other files."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from rayzero.errors import CheckpointError, ConfigError

_T = TypeVar("_T")


def convert(
    source: Annotated[
        str,
        typer.Argument(
            help="A checkpoint of RayZero (or a run: its newest one), Hugging Face safetensors, torch DCP, DeepSpeed "
            "ZeRO or a DeepSpeed universal checkpoint; a path or a URL."
        ),
    ],
    dest: Annotated[str, typer.Argument(help="The folder to write; it must not exist.")],
    to: Annotated[
        str, typer.Option("--to", help="hf (safetensors, weights only), dcp (torch.distributed.checkpoint) or rayzero.")
    ] = "hf",
    dtype: Annotated[
        str | None,
        typer.Option(help="Dtype of the weights in hf and dcp: float32, bfloat16 or float16; default: kept."),
    ] = None,
    max_shard_size: Annotated[str, typer.Option(help="Most bytes of a file, such as 5GB or 512MiB.")] = "5GB",
    optimizer: Annotated[
        str, typer.Option(help="For rayzero: import path of the optimizer's class, if the source does not say; AdamW.")
    ] = "",
    weights_only: Annotated[bool, typer.Option("--weights-only", help="Leave optimizer states out.")] = False,
    config: Annotated[
        Path | None,
        typer.Option(
            help="transformers' config.json of the model, for its published names; default: beside the source."
        ),
    ] = None,
) -> None:
    """Convert a checkpoint, parameter by parameter, with its optimizer states where both formats have them."""
    from rayzero.convert.conversion import convert as convert_checkpoint
    from rayzero.convert.conversion import require_target
    from rayzero.convert.remote_checkpoints import is_url
    from rayzero.layout.model_layout import dtype_from_name

    require_target(to)  # before the source is looked at, which may have warnings of its own
    act = partial(
        convert_checkpoint,
        dest=dest,
        to=to,
        dtype=None if dtype is None else dtype_from_name(dtype),
        max_bytes=_bytes(max_shard_size),
        optimizer=optimizer,
        weights_only=weights_only,
        config=config,
    )
    typer.echo(act(source) if is_url(source) else _with_newest(Path(source), act))


def _with_newest(source: Path, act: Callable[[Path], _T]) -> _T:
    """What ``act`` makes of a run's newest checkpoint, or of a later one if the run deletes that before it is open;
    what is no run is itself the checkpoint."""
    from rayzero.cluster.files.run_dir import checkpoints_of

    while True:
        catalog = checkpoints_of(source).catalog()
        # a reader says what is wrong with the only one
        checkpoint = catalog.newest() if catalog.sound else next(iter(catalog.damaged), source)
        assert checkpoint is not None
        try:
            return act(checkpoint)
        except CheckpointError:
            if checkpoint == source or checkpoint.exists():
                raise


def _bytes(text: str) -> int:
    from rayzero.quantities import parse_bytes

    try:
        return int(str(parse_bytes(text)))
    except ValueError as error:
        raise ConfigError(f"--max-shard-size is {text!r} but {error}") from error


def export(
    checkpoint: Annotated[
        str, typer.Argument(help="A checkpoint's directory, or a run's: its newest checkpoint; a path or a URL.")
    ],
    out: Annotated[Path, typer.Argument(help="A .safetensors file, or a folder to put model.safetensors in.")],
    dtype: Annotated[str, typer.Option(help="Dtype of the masters: float32, bfloat16 or float16.")] = "float32",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")] = False,
) -> None:
    """Stream a checkpoint's parameters and buffers into one file, under their plain names."""
    from rayzero.convert.conversion import export_full
    from rayzero.convert.remote_checkpoints import nearby
    from rayzero.layout.model_layout import dtype_from_name

    with nearby(checkpoint, out) as place:

        def write(directory: Path) -> str:
            path = export_full(directory, out, dtype=dtype_from_name(dtype), overwrite=overwrite)
            source = directory if place == Path(checkpoint) else checkpoint
            return f"{path}  {path.stat().st_size:,} bytes, from {source}"

        typer.echo(_with_newest(place, write))
