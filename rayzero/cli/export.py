"""``rayzero export``: writes a checkpoint as one complete model.safetensors."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def export(
    checkpoint: Annotated[
        str, typer.Argument(help="A checkpoint's directory, or a run's: its newest checkpoint; a path or a URL.")
    ],
    out: Annotated[Path, typer.Argument(help="A .safetensors file, or a folder to put model.safetensors in.")],
    dtype: Annotated[str, typer.Option(help="Dtype of the masters: float32, bfloat16 or float16.")] = "float32",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")] = False,
) -> None:
    """Stream a checkpoint's parameters and buffers into one file, under their plain names."""
    from rayzero.cluster.files.run_dir import checkpoints_of
    from rayzero.convert.full_export import export_full
    from rayzero.convert.remote_checkpoints import nearby
    from rayzero.layout.model_layout import dtype_from_name

    with nearby(checkpoint, out) as place:
        catalog = checkpoints_of(place).catalog()
        directory = catalog.newest() or next(iter(catalog.damaged), place)  # export refuses a damaged one and says why
        path = export_full(directory, out, dtype=dtype_from_name(dtype), overwrite=overwrite)
    typer.echo(f"{path}  {path.stat().st_size:,} bytes, from {directory if place == Path(checkpoint) else checkpoint}")
