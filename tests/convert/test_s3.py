"""The same over S3, against a server in this process: moto's. Skipped by name where s3fs or moto is not installed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoint.conftest import Written, require_one_line

from rayzero.checkpoint import CheckpointReader
from rayzero.convert.conversion import convert
from rayzero.convert.remote_checkpoints import RemoteFolder, newest_checkpoint, upload_checkpoint
from rayzero.errors import CheckpointError, CheckpointWriteError

pytest.importorskip("s3fs")
moto = pytest.importorskip("moto.server")
pytestmark = pytest.mark.filterwarnings("ignore")  # of packages that are not ours


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of an empty bucket."""
    import boto3
    import s3fs

    server: Any = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "RAYZERO_CACHE": str(tmp_path / "cache"),
    }.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    boto3.client("s3").create_bucket(Bucket="models")
    yield "s3://models"
    server.stop()
    s3fs.S3FileSystem.clear_instance_cache()


def test_a_checkpoint_goes_to_s3_and_back(bucket: str, written: Written, directory: Path, tmp_path: Path) -> None:
    written.save(directory)
    assert newest_checkpoint(f"{bucket}/run") is None
    upload_checkpoint(directory, f"{bucket}/run/checkpoints")
    found = newest_checkpoint(f"{bucket}/run")
    assert found is not None
    with CheckpointReader(found) as copy, CheckpointReader(directory) as first:
        copy.verify()
        assert copy.digest == first.digest
    convert(f"{bucket}/run", tmp_path / "hf")
    RemoteFolder(f"{bucket}/run/checkpoints/{directory.name}").remove("owner-000.safetensors")
    assert newest_checkpoint(f"{bucket}/run") is None


def test_a_bucket_that_is_not_there_is_named(bucket: str, written: Written, directory: Path) -> None:
    written.save(directory)
    with pytest.raises(CheckpointWriteError) as caught:
        upload_checkpoint(directory, "s3://nobodys/run")
    assert "s3://nobodys/run/step-000030" in require_one_line(caught.value)
    with pytest.raises(CheckpointError, match="bucket does not exist"):
        convert("s3://nobodys/run", directory.with_name("x"))
