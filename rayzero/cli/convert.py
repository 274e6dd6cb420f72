"""``rayzero convert``: turns a checkpoint of another system into one of RayZero, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rayzero.errors import ConfigError


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
    from rayzero.convert.storage import is_url
    from rayzero.layout.model_layout import dtype_from_name

    done = convert_checkpoint(
        source if is_url(source) else newest(Path(source)),
        dest,
        to=to,
        dtype=None if dtype is None else dtype_from_name(dtype),
        max_bytes=_bytes(max_shard_size),
        optimizer=optimizer,
        weights_only=weights_only,
        config=config,
    )
    typer.echo(done)


def newest(source: Path) -> Path:
    """A run's newest checkpoint; anything else is itself."""
    from rayzero.cluster.files.run_dir import checkpoints_of

    return (checkpoints_of(source).catalog().newest() if source.is_dir() else None) or source


def _bytes(text: str) -> int:
    from rayzero.quantities import parse_bytes

    try:
        return int(str(parse_bytes(text)))
    except ValueError as error:
        raise ConfigError(f"--max-shard-size is {text!r} but {error}") from error
