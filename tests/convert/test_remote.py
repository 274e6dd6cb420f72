"""Checkpoints by URL: a copy exists there once its manifest does, and here once every file has its size."""

from __future__ import annotations

import builtins
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from checkpoint.conftest import Written, random_values, require_one_line, small_layout
from safetensors.torch import load_file
from torch import nn

import rayzero
from rayzero.checkpoint import CheckpointReader
from rayzero.config import RunConfig
from rayzero.convert import remote_checkpoints
from rayzero.convert.conversion import convert
from rayzero.convert.remote_checkpoints import (
    RemoteFolder,
    Uploads,
    fetch_checkpoint,
    is_url,
    newest_checkpoint,
    newest_url,
    upload_checkpoint,
)
from rayzero.engine.context import RankContext, running_in
from rayzero.errors import CheckpointError, CheckpointWriteError, ConfigError, UnsupportedError

MANIFEST = "manifest.json"


@pytest.fixture(params=["memory", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A remote folder, in memory or in another place of this machine."""
    yield f"memory://{tmp_path.name}/run" if request.param == "memory" else f"file://{tmp_path}/remote/run"
    fsspec.filesystem("memory").store.clear()


@pytest.fixture
def saved(written: Written, directory: Path) -> Path:
    written.save(directory)
    return directory


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RAYZERO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_checkpoint_comes_back_as_it_was(url: str, saved: Path, cache: Path) -> None:
    assert newest_checkpoint(url) is None
    assert upload_checkpoint(saved, url) == f"{url}/step-000030"
    found = newest_checkpoint(url)
    assert found is not None
    assert found.parent == cache
    with CheckpointReader(found) as copy, CheckpointReader(saved) as first:
        copy.verify()
        assert copy.manifest.to_json() == first.manifest.to_json()
    assert newest_checkpoint(url) == found == fetch_checkpoint(f"{url}/step-000030", cache)


class Cut(Exception):
    """The process ends here."""


@pytest.mark.parametrize("before", range(4))
def test_an_upload_that_is_cut_leaves_the_one_before_or_none(
    url: str, written: Written, saved: Path, monkeypatch: pytest.MonkeyPatch, before: int
) -> None:
    """Whatever has arrived: no reader takes a part for a checkpoint."""
    older = saved.with_name("step-000020")
    written.save(older, step=20)
    upload_checkpoint(older, url)
    put = RemoteFolder.put
    left = iter(range(before))

    def cut(self: RemoteFolder, path: Path, name: str) -> None:
        if next(left, None) is None:
            raise Cut
        put(self, path, name)

    for _ in range(2):  # a new name; then one that replaces a whole checkpoint
        with monkeypatch.context() as patch:
            patch.setattr(RemoteFolder, "put", cut)
            if before < len(list(saved.iterdir())):
                with pytest.raises(Cut):
                    upload_checkpoint(saved, url)
        assert newest_url(url) == f"{url}/step-000020"
        upload_checkpoint(saved, url)
        assert newest_url(url) == f"{url}/step-000030"
        left = iter(range(before))


def test_the_manifest_comes_last(url: str, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []
    put = RemoteFolder.put

    def noted(self: RemoteFolder, path: Path, name: str) -> None:
        sent.append(name)
        put(self, path, name)

    monkeypatch.setattr(RemoteFolder, "put", noted)
    (saved / "model-1").mkdir()
    shutil.copy(saved / MANIFEST, saved / "model-1" / MANIFEST)  # a later model's checkpoint is a part of it
    upload_checkpoint(saved, url)
    assert sent[-1] == MANIFEST
    assert sorted(sent) == sorted(path.relative_to(saved).as_posix() for path in saved.rglob("*") if path.is_file())


def test_a_damaged_or_incomplete_copy_is_skipped_or_refused(
    url: str, written: Written, saved: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    written.save(saved.with_name("step-000020"), step=20)
    for directory in (saved, saved.with_name("step-000020")):
        upload_checkpoint(directory, url)
    RemoteFolder(f"{url}/step-000030").remove("owner-001.safetensors")
    assert newest_url(url) == f"{url}/step-000020"
    assert "owner-001.safetensors has None bytes" in caplog.text
    with pytest.raises(CheckpointError) as caught:
        fetch_checkpoint(f"{url}/step-000030", cache)
    assert "owner-001.safetensors" in require_one_line(caught.value)
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        fetch_checkpoint(f"{url}/nowhere", cache)


def test_a_copy_that_stops_half_way_has_no_name(url: str, saved: Path, cache: Path, monkeypatch: Any) -> None:
    upload_checkpoint(saved, url)

    def cut(self: RemoteFolder, name: str, path: Path) -> None:
        path.write_bytes(b"some")

    with monkeypatch.context() as patch:
        patch.setattr(RemoteFolder, "get", cut)
        with pytest.raises(CheckpointError, match="came with 4 bytes"):
            fetch_checkpoint(f"{url}/step-000030", cache)
    assert [path.name for path in cache.iterdir() if not path.name.endswith(".lock")] == []


def test_processes_that_ask_together_copy_once(
    saved: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"file://{tmp_path}/remote/run"  # of a file in memory, all its readers share one position
    upload_checkpoint(saved, url)
    got: list[str] = []
    get = RemoteFolder.get

    def noted(self: RemoteFolder, name: str, path: Path) -> None:
        got.append(name)
        get(self, name, path)

    monkeypatch.setattr(RemoteFolder, "get", noted)
    threads = [threading.Thread(target=fetch_checkpoint, args=(f"{url}/step-000030", cache)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(got) == sorted(path.name for path in saved.iterdir())


def test_convert_takes_a_url_of_a_run_or_of_any_checkpoint(url: str, saved: Path, tmp_path: Path) -> None:
    upload_checkpoint(saved, f"{url}/checkpoints")
    run = convert(url, tmp_path / "of-run", to="dcp")
    for file in run.path.iterdir():
        RemoteFolder(f"{url}/dcp").put(file, file.name)
    again = convert(f"{url}/dcp", tmp_path / "again", to="hf")
    RemoteFolder(url).put(again.path / "model.safetensors", "alone.safetensors")
    alone = convert(f"{url}/alone.safetensors", tmp_path / "alone", to="hf")
    first, second = (load_file(each.path / "model.safetensors") for each in (again, alone))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]
    with pytest.raises(CheckpointError, match="nothing is at"):
        convert(f"{url}/nowhere", tmp_path / "x")


# ---- in a run ---------------------------------------------------------------------------------------------------


def train(folder: Path, url: str, resume: Any = None, steps: int = 2) -> list[float]:
    """Steps of a small model from where it is; a checkpoint and its copy for each."""
    with running_in(RankContext()) as context:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        model, optimizer = rayzero.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1), resume=resume)
        for step in range(context.step, context.step + steps):
            model(torch.full((1, 3), 1.0 + step)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            name = folder / f"step-{step + 1}"
            rayzero.save_checkpoint(optimizer, name, keep_last=1, upload_to=url)
        return [value for param in rayzero.full_state_dict(model).values() for value in param.flatten().tolist()]


def test_a_run_goes_on_from_its_copy_on_another_machine(url: str, tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", f"{url}/whole", steps=4)
    train(tmp_path / "here", url)
    shutil.rmtree(tmp_path / "here")
    resumed = rayzero.newest_checkpoint(url)
    assert train(tmp_path / "there", url, resumed) == whole
    assert train(tmp_path / "third", f"{url}/third", f"{url}/step-2") == whole


def test_uploads_take_turns_and_leave_out_what_is_too_old(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    done: list[str] = []

    def slow(directory: Path, url: str) -> str:
        begun.set()
        assert go_on.wait(60)
        done.append(directory.name)
        if directory.name == "c":
            raise CheckpointWriteError("the bucket is gone")
        if directory.name == "a":
            raise RecursionError("anything")
        return url

    monkeypatch.setattr(remote_checkpoints, "upload_checkpoint", slow)
    uploads = Uploads()
    uploads.add(tmp_path / "a", "memory://x")
    assert begun.wait(60)
    uploads.add(tmp_path / "b", "memory://x")
    uploads.add(tmp_path / "c", "memory://x")
    assert uploads.busy == {tmp_path / "a", tmp_path / "c"}
    go_on.set()
    uploads.wait()
    assert (done, uploads.busy) == (["a", "c"], frozenset())
    assert "NOT UPLOADED: memory://x: anything" in caplog.text
    assert "NOT UPLOADED: memory://x: the bucket is gone" in caplog.text
    assert f"NOT UPLOADED: {tmp_path / 'b'}: a newer one" in caplog.text


def test_retention_leaves_what_is_being_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()
    put = RemoteFolder.put

    def slow(self: RemoteFolder, path: Path, name: str) -> None:
        begun.set()
        assert go_on.wait(60)
        put(self, path, name)

    monkeypatch.setattr(RemoteFolder, "put", slow)
    with running_in(RankContext()):
        model = nn.Linear(3, 2)
        _, optimizer = rayzero.prepare(model, torch.optim.SGD(model.parameters()))
        rayzero.save_checkpoint(optimizer, tmp_path / "run" / "step-0", upload_to=f"file://{tmp_path}/remote")
        assert begun.wait(60)
        optimizer.step()
        rayzero.save_checkpoint(optimizer, tmp_path / "run" / "step-1", keep_last=1)
        assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["step-0", "step-1"]
        go_on.set()
    assert newest_url(f"file://{tmp_path}/remote") == f"file://{tmp_path}/remote/step-0"  # the loop's end waits for it


# ---- refusals ---------------------------------------------------------------------------------------------------


def missing(name: str) -> Callable[..., Any]:
    """An import that does not find the package ``name``."""
    real = builtins.__import__

    def find(wanted: str, *args: Any, **kwargs: Any) -> Any:
        if wanted.partition(".")[0] == name:
            raise ImportError(f"No module named {wanted!r}")
        return real(wanted, *args, **kwargs)

    return find


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedError, match=r"no storage is known as nowhere://"):
        RemoteFolder("nowhere://bucket/run")
    with monkeypatch.context() as patch:
        patch.setattr(builtins, "__import__", missing("fsspec"))
        with pytest.raises(UnsupportedError, match=r"needs the package fsspec: pip install rayzero\[remote\]"):
            RemoteFolder("memory://bucket/run")

    def not_installed(url: str) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr("fsspec.core.url_to_fs", not_installed)
    with pytest.raises(UnsupportedError, match=r"Install s3fs to access S3\): pip install rayzero\[s3\]"):
        RemoteFolder("s3://bucket/run")


@pytest.mark.parametrize("url", ["ftp://127.0.0.1:1/run", "reference://run", "dir://run"])
def test_a_storage_that_cannot_be_opened_is_one_line(url: str) -> None:
    """Some connect at once, some lack arguments that no URL carries; each raises what it likes."""
    with pytest.raises(CheckpointError, match=rf"^{url} cannot be opened: [^\n]+$"):
        RemoteFolder(url)


def test_places_that_are_not_what_is_asked_for() -> None:
    with pytest.raises(ConfigError, match="rayzero convert URL FOLDER"):
        rayzero.Weights("memory://x/y")
    with pytest.raises(ConfigError, match="give the URL as upload_to"):
        RunConfig(storage_path="s3://bucket/run")
    with pytest.raises(ConfigError, match="must be a URL"):
        RunConfig(upload_to="bucket/run")
    assert [is_url(place) for place in ("s3://b", "runs/a", Path("s3://b"), "c:/x", None)] == [True, *[False] * 4]


def test_a_checkpoint_that_changes_while_it_is_copied_is_not_taken_for_one(
    url: str, written: Written, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = RemoteFolder.put

    def replaced(self: RemoteFolder, path: Path, name: str) -> None:
        put(self, path, name)
        if name == "rank-0000.safetensors":
            Written(small_layout(), random_values(small_layout(), seed=9)).save(saved, step=31)

    monkeypatch.setattr(RemoteFolder, "put", replaced)
    with pytest.raises(CheckpointWriteError, match="was replaced by another checkpoint"):
        upload_checkpoint(saved, url)
    assert newest_url(url) is None
