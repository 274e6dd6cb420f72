"""Checkpoints: safetensors shards and a JSON manifest, written whole or not at all.

A checkpoint is a directory such as ``step-000030/``: ``owner-000.safetensors`` … (what each owner holds),
``rank-0000.safetensors`` … (each rank's loop state) and ``manifest.json``. Owners and ranks write into
``staging_path(directory)`` and fsync every file. The process that commits first moves that folder to a name that only
it uses; one rename then makes the checkpoint exist. Nothing here is pickled.

This package knows files, names and element ranges; not stores, owners or ranks.
"""

from __future__ import annotations

from rayzero.checkpoint.manifest import FilePiece, Manifest, owner_file_name, rank_file_name
from rayzero.checkpoint.reader import Catalog, CheckpointReader, SavedCheckpoint
from rayzero.checkpoint.writer import (
    checkpoint_folders,
    checkpoint_name,
    commit_checkpoint,
    staging_path,
    stale_folders,
    sweep_stale,
    write_rank_state,
    write_tensors,
)

__all__ = [
    "Catalog",
    "CheckpointReader",
    "FilePiece",
    "Manifest",
    "SavedCheckpoint",
    "checkpoint_folders",
    "checkpoint_name",
    "commit_checkpoint",
    "owner_file_name",
    "rank_file_name",
    "staging_path",
    "stale_folders",
    "sweep_stale",
    "write_rank_state",
    "write_tensors",
]
