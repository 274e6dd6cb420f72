"""Checkpoints in remote storage, by URL (s3://, gs://): copied there when they are complete, copied here to be read.

Any storage that fsspec knows. Its packages are optional and refused by name where they are missing.
"""

from __future__ import annotations

from rayzero.convert.remote.copies import (
    cache_folder,
    fetch_checkpoint,
    fetch_folder,
    local_checkpoint,
    nearby,
    newest_checkpoint,
    newest_url,
    upload_checkpoint,
)
from rayzero.convert.remote.storage import is_url
from rayzero.convert.remote.uploads import Uploads

__all__ = [
    "Uploads",
    "cache_folder",
    "fetch_checkpoint",
    "fetch_folder",
    "is_url",
    "local_checkpoint",
    "nearby",
    "newest_checkpoint",
    "newest_url",
    "upload_checkpoint",
]
