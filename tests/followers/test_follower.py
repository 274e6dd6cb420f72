"""A follower has, of every version that it reads, the bits of its export."""

from __future__ import annotations

import copy
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.models import Critic, Net, seeded, tokens
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

import rayzero
from rayzero import ZeroConfig
from rayzero.convert.conversion import export_full
from rayzero.engine.context import RankContext
from rayzero.errors import ConfigError, StallError, StoreClosedError, UnsupportedError, VersionGoneError
from rayzero.followers import follower as follower_module
from rayzero.followers import host_shards
from rayzero.followers.follower import Follower
from rayzero.slabs.sweep import SHARED_MEMORY, list_slabs
from rayzero.store.shm.signals import fence_acquire
from rayzero.testing import run_ranks
from tests.support import needs

from .on_network import describe
from .watcher import digest

pytestmark = needs.shared_memory

STEPS = 50
BF16 = ZeroConfig(units=["Block"], precision="bf16", shard_bytes="16KiB")


def take_step(model: nn.Module, optimizer: Any, step: int, rank: int) -> None:
    x, y = tokens(step, rank)
    F.cross_entropy(model(x).float().flatten(0, 1), y.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()


def exported(optimizer: Any, folder: Path, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """The export of the present version, tied weights once."""
    rayzero.save_checkpoint(optimizer, folder / "checkpoint")
    weights = load_file(export_full(folder / "checkpoint", folder / "export", dtype=dtype))
    return {name: tensor for name, tensor in weights.items() if name != "head.weight"}


def same(reading: Iterator[tuple[str, Tensor]], wanted: dict[str, Tensor]) -> bool:
    return digest(reading) == digest(wanted.items())


class AllKinds:
    """Followers that read every version, skip some, come late, are slow, and stop."""

    def __init__(self, run: str) -> None:
        self.run, self.every, self.skips, self.slow = run, *(rayzero.follow(run) for _ in range(3))
        self.late: Follower | None = None
        self.begun: Any = None

    def look(self, version: int, wanted: dict[str, Tensor]) -> None:
        assert self.every.wait() == version
        assert same(self.every.read(), wanted)
        if version % 7 == 0:
            assert same(self.skips.read(version), wanted)
        if version == 10:
            self.begun = self.slow.read(10), wanted
            next(self.begun[0])
        if version == 40:
            reading, before = self.begun
            assert digest(reading) == digest(list(before.items())[1:])  # it held what is long overwritten
        if version == 30:
            self.late = rayzero.follow(self.run)
            self.skips.close()
            with pytest.raises(StoreClosedError):
                self.skips.read()
            self.skips = rayzero.follow(self.run)
        if self.late is not None:
            assert same(self.late.read(), wanted)

    def close(self) -> None:
        for follower in (self.every, self.skips, self.slow, self.late):
            if follower is not None:
                follower.close()


@pytest.mark.parametrize("way", ["shm", pytest.param("grpc", marks=pytest.mark.thorough), "tls"])
def test_after_each_step_every_follower_has_the_bits_of_the_export(way: str, tmp_path: Path) -> None:
    base, steps = seeded(Net, 3), STEPS // 5 if way == "tls" else STEPS

    def train(context: RankContext) -> None:
        torch.set_num_threads(1)
        model = copy.deepcopy(base)
        model, optimizer = rayzero.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), BF16)
        followers = None
        if context.rank == 0:
            if way != "shm":
                describe(context, tmp_path)
            followers = AllKinds(context.run if way == "shm" else str(tmp_path))
            context.on_close(lambda _, followers=followers: followers.close())
        for step in range(steps):
            take_step(model, optimizer, step, context.rank)
            folder = tmp_path / str(step)
            if followers is None:
                rayzero.save_checkpoint(optimizer, folder / "checkpoint")
            else:
                followers.look(step + 1, exported(optimizer, folder))
        if followers is not None and way != "shm":
            found = followers.every.stats()
            assert found.versions == steps
            assert found.whole_bytes < 3 * found.versions * 10_000 or way == "tls", "changes came"
            assert found.change_bytes > 0
            assert found.arrivals > 0
            assert found.arrival_s / found.arrivals < 5.0

    run_ranks(train, 2, 3, "shm" if way == "shm" else "grpc", tls=way == "tls")


def alone(
    loop: Any, config: ZeroConfig = BF16, base: nn.Module | None = None, *, on_network: Path | None = None
) -> Any:
    """Let ``loop(context, model, optimizer)`` train on one rank with two owners; what it returns. ``on_network``: the
    folder in which the run is described to followers that share no memory with it."""
    plain = seeded(Net, 3) if base is None else base

    def train(context: RankContext) -> Any:
        torch.set_num_threads(1)
        trained = [parameter for parameter in plain.parameters() if parameter.requires_grad]
        model, optimizer = rayzero.prepare(plain, torch.optim.AdamW(trained, lr=1e-2), config)
        if on_network is not None:
            describe(context, on_network)
        return loop(context, model, optimizer)

    return run_ranks(train, 1, 2, "shm" if on_network is None else "grpc", config=config)[0]


def of(context: RankContext, run: Path | str, model: int = 0) -> Follower:
    """A follower that is closed with the rank."""
    follower = rayzero.follow(run, model=model)
    context.on_close(lambda _: follower.close())
    return follower


def test_a_reader_is_told_what_it_loses() -> None:
    def loop(context: RankContext, model: nn.Module, optimizer: Any) -> None:
        follower = rayzero.follow(context.run)
        first = follower.read()
        assert (first.version, follower.version) == (0, 0)
        name, tensor = next(first)
        before = tensor.clone()
        take_step(model, optimizer, 0, 0)
        assert follower.wait(1) == 1
        assert dict(follower.read(0)).keys() == follower.declared.keys()  # it is held still
        second = follower.read()
        assert second.version == 1
        with pytest.raises(VersionGoneError, match=r"v0 was held for a reader until the follower began to read v1"):
            next(first)
        assert torch.equal(tensor, before), name
        with pytest.raises(VersionGoneError, match=r"v0 is overwritten: v1 is published"):
            follower.read(0)
        with pytest.raises(StallError, match=r"v3 of run .* did not come in 0.1 s: v1 is published"):
            follower.read(3, timeout_s=0.1)

    alone(loop)


def test_what_a_follower_has_read_last_outlives_the_run() -> None:
    followers = []

    def loop(context: RankContext, model: nn.Module, optimizer: Any) -> None:
        followers.append(rayzero.follow(context.run))
        assert followers[0].wait(0) == 0
        take_step(model, optimizer, 0, 0)
        rayzero.full_state_dict(model)  # waits for the version

    alone(loop)
    assert followers[0].read().version == 1
    with pytest.raises(StoreClosedError, match="v1 was the last here"):
        followers[0].wait()


def test_a_run_that_is_not_there_is_waited_for_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    follower = rayzero.follow("nobody")
    assert "follow('nobody') waits for a run of that name: run 'nobody' has no optimizers in /dev/shm" in caplog.text
    with pytest.raises(StallError, match=r"run 'nobody' has no optimizers in /dev/shm"):
        follower.wait(0, timeout_s=0.05)
    with pytest.raises(ConfigError, match="which is not a directory here"):
        rayzero.follow("nobody", slab_dir=tmp_path / "none")
    with pytest.raises(ConfigError, match="there is no such file"):
        rayzero.follow("nobody", config=tmp_path / "none")


def test_a_config_of_another_model_is_refused_by_name(tmp_path: Path) -> None:
    llama = tmp_path / "config.json"
    llama.write_text(json.dumps({"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1, "vocab_size": 99}))

    def loop(context: RankContext, model: nn.Module, optimizer: Any) -> None:
        with rayzero.follow(context.run, config=llama) as follower:
            with pytest.raises(ConfigError, match=r"config\.json is of no model that has them: pass"):
                follower.read()
            assert follower.into(copy.deepcopy(model)) == 0, "which needs no other names"

    alone(loop)


class Several(nn.Module):
    """Parameters of several kinds: frozen, 0-dim, empty, odd sizes; and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, 24)
        self.frozen = nn.Linear(24, 24)
        self.frozen.requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.none = nn.Parameter(torch.zeros(0, 3))
        self.head = nn.Linear(24, 37)
        self.register_buffer("steps", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.frozen(self.embed(x % 37)) * self.scale)


@pytest.mark.spread(3)
@pytest.mark.parametrize(
    "config",
    [
        ZeroConfig(shard_bytes="4KiB"),
        ZeroConfig(precision="fp16", units=["Linear"], keep_fp32=["embed"]),
        ZeroConfig(precision="bf16", cpu_compression="lossless"),
        ZeroConfig(precision="bf16", cpu_compression="int8"),
    ],
    ids=["fp32", "fp16, partly fp32", "a coded frozen part", "a frozen part with loss"],
)
@pytest.mark.parametrize("way", ["shm", "grpc"])
def test_parameters_of_every_kind_are_followed(way: str, config: ZeroConfig, tmp_path: Path) -> None:
    """Over the network, frozen ones come once."""
    folder = None if way == "shm" else tmp_path

    def loop(context: RankContext, model: nn.Module, optimizer: Any) -> None:
        follower, sizes = of(context, folder or context.run), []
        for step in range(3):
            take_step(model, optimizer, step, 0)
            found = {name: tensor.clone() for name, tensor in follower.read(step + 1)}
            wanted = rayzero.full_state_dict(model)
            assert set(wanted) - set(found) == {"steps"}
            for name, tensor in found.items():
                assert torch.equal(tensor, wanted[name].to(tensor.dtype)), name
                assert follower.declared[name] == (tensor.dtype, tuple(tensor.shape))
            sizes.append(follower.stats())
        if folder is not None:
            assert sizes[0].whole_bytes == sizes[2].whole_bytes > sizes[0].change_bytes == 0 < sizes[2].change_bytes

    alone(loop, config, seeded(Several, 1), on_network=folder)


def test_a_version_goes_into_a_model_in_place() -> None:
    def loop(context: RankContext, model: nn.Module, optimizer: Any) -> None:
        follower = rayzero.follow(context.run)
        take_step(model, optimizer, 0, 0)
        wanted = rayzero.full_state_dict(model)
        for dtype in (torch.bfloat16, torch.float32):
            other = seeded(Net, 4).to(dtype)
            parameters = list(other.parameters())
            assert follower.into(other, 1) == 1
            assert all(one is before for one, before in zip(other.parameters(), parameters, strict=True))
            assert other.head.weight is other.embed.weight
            for name, tensor in other.state_dict().items():
                assert torch.equal(tensor, wanted[name].bfloat16().to(dtype)), name
        before = copy.deepcopy(other)
        with pytest.raises(ConfigError, match=r"the model has no parameter 'layers.2.down.bias'"):
            follower.into(Net(2))
        with pytest.raises(ConfigError, match=r"the run publishes no 'layers.3.down.bias'"):
            follower.into(Net(4))
        with pytest.raises(
            ConfigError, match=r"is of shape \(32, 32\) in the model and of shape \(32, 64\) in the run"
        ):
            follower.into(Net(width=32))
        with pytest.raises(ConfigError, match=r"which cannot hold the run's torch.bfloat16"):
            follower.into(copy.deepcopy(other).half())
        assert all(
            torch.equal(a.float(), b.float()) for a, b in zip(before.parameters(), other.parameters(), strict=True)
        )

    alone(loop)


def shared(model: Net) -> None:
    model.layers[0].up.weight = model.layers[1].up.weight


def with_norm(change: Callable[[Tensor], Tensor]) -> Callable[[Net], None]:
    """Gives the parameter that the run publishes last another kind of memory."""

    def act(model: Net) -> None:
        model.norm.bias = nn.Parameter(change(model.norm.bias.detach()), requires_grad=False)

    return act


@torch.inference_mode()
def inferring(tensor: Tensor) -> Tensor:
    return tensor.clone()


def lazy(model: Net) -> None:
    model.layers[0].up = nn.LazyLinear(128)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (shared, "'layers.1.up.weight' and 'layers.0.up.weight' are one tensor in the model and two in the run"),
        (lazy, "'layers.0.up.weight' is without memory in the model"),
        (with_norm(inferring), "'norm.bias' is an inference tensor, which only torch.inference_mode"),
        (with_norm(lambda tensor: tensor[:1].expand(64)), "'norm.bias' is an expanded tensor in the model"),
        (with_norm(Tensor.to_sparse), "'norm.bias' is of layout torch.sparse_coo in the model"),
        (with_norm(lambda tensor: tensor.to(torch.float8_e5m2)), "'norm.bias' is torch.float8_e5m2 in the model"),
    ],
    ids=["tied", "lazy", "inference", "expanded", "sparse", "float8"],
)
def test_a_model_that_cannot_take_all_of_a_version_takes_nothing(change: Callable[[Net], None], words: str) -> None:
    def loop(context: RankContext, model: nn.Module, optimizer: Any) -> None:
        other = seeded(Net, 4)
        change(other)
        before = other.embed.weight.clone()
        with pytest.raises(ConfigError, match=re.escape(words)):
            rayzero.follow(context.run).into(other)
        assert torch.equal(other.embed.weight, before)

    alone(loop)


def test_only_a_module_takes_a_version() -> None:
    with pytest.raises(ConfigError, match=r"model is of type dict but must be a torch\.nn\.Module"):
        rayzero.follow("nobody").into({})  # type: ignore[arg-type]


@pytest.mark.parametrize("way", ["shm", "grpc"])
def test_readers_of_one_version_share_it(way: str, tmp_path: Path) -> None:
    def loop(context: RankContext, model: nn.Module, optimizer: Any) -> None:
        follower = of(context, context.run if way == "shm" else tmp_path)
        wanted = exported(optimizer, tmp_path)
        readings = [follower.read() for _ in range(3)]
        together = zip(*zip(*readings, strict=True), strict=True)  # tensor by tensor, as several threads do
        assert {digest(each) for each in together} == {digest(wanted.items())}
        assert all(same(follower.read(), wanted) for _ in readings)
        assert follower.stats().versions == 1 + 3 * (way == "grpc")

    alone(loop, on_network=None if way == "shm" else tmp_path)


@pytest.mark.parametrize("way", ["shm", "grpc"])
def test_a_run_with_owners_on_devices_is_refused_by_name(way: str, tmp_path: Path) -> None:
    folder = None if way == "shm" else tmp_path

    def loop(context: RankContext, model: nn.Module, optimizer: Any) -> None:
        with pytest.raises(UnsupportedError, match="followers need offload_fraction=1"):
            of(context, folder or context.run).read(timeout_s=30.0)

    alone(loop, ZeroConfig(units=["Block"], offload_fraction=0.5), on_network=folder)


def test_each_of_several_models_is_followed() -> None:
    def loop(context: RankContext, model: nn.Module, optimizer: Any) -> None:
        critic = seeded(Critic, 5)
        critic, _ = rayzero.prepare(critic, torch.optim.AdamW(critic.parameters()), ZeroConfig(precision="bf16"))
        take_step(model, optimizer, 0, 0)
        wanted = {name: tensor.bfloat16() for name, tensor in rayzero.full_state_dict(critic).items()}
        assert same(rayzero.follow(context.run, model=1).read(0), wanted)
        assert rayzero.follow(context.run).read(1).version == 1

    alone(loop)


def test_what_changes_while_it_is_copied_is_copied_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def loop(context: RankContext, model: nn.Module, optimizer: Any) -> None:
        begun = follower_of_all(context.run)
        meanwhile: list[Callable[[], object]] = []

        def fence() -> None:
            if meanwhile:
                meanwhile.pop()()
            fence_acquire()

        monkeypatch.setattr(host_shards, "fence_acquire", fence)
        for step in range(2):
            meanwhile.append(lambda step=step: (take_step(model, optimizer, step, 0), rayzero.full_state_dict(model)))
            reading = rayzero.follow(context.run).read()  # its first shard is overwritten before it is whole
            assert (reading.version, meanwhile) == (step + 1, [])
            assert same(reading, exported(optimizer, tmp_path / f"step {step}"))
        meanwhile.append(lambda: (take_step(model, optimizer, 2, 0), rayzero.full_state_dict(model)))
        with pytest.raises(VersionGoneError, match="v2 is overwritten: v3 is published"):
            begun.read(2)

        def write() -> None:
            with torch.no_grad():
                model.embed.weight.mul_(0.5)
            written.update(exported(optimizer, tmp_path / "write"))

        written: dict[str, Tensor] = {}
        meanwhile.append(write)
        fresh = rayzero.follow(context.run)
        assert same(fresh.read(3), written)

    alone(loop)


def follower_of_all(run: str) -> Follower:
    """One that has read a version before."""
    follower = rayzero.follow(run)
    follower.read().close()
    return follower


def test_a_host_that_has_not_all_optimizers_is_named() -> None:
    def train(context: RankContext) -> None:
        model = seeded(Several, 1)
        rayzero.prepare(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad]), ZeroConfig())
        with pytest.raises(StallError, match=r"only 1 of 2 optimizers of run .* can be read on this host"):
            rayzero.follow(context.run).read(timeout_s=0.2)

    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY, prefix="test-host-") as other:
        run_ranks(train, 1, 2, "shm", hosts={"optimizer 1": Path(other)})


def test_a_directory_that_goes_with_its_run_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower_module, "_ENDED_S", 0.1)
    followers = []

    def train(context: RankContext) -> None:
        model = seeded(Several, 1)
        rayzero.prepare(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad]), ZeroConfig())
        followers.append(rayzero.follow(context.run, slab_dir=host))
        assert followers[0].read().version == 0

    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY, prefix="test-host-") as host:
        run_ranks(train, 1, 1, "shm", hosts={"rank 0": Path(host), "optimizer 0": Path(host)})
    with pytest.raises(StoreClosedError, match="v0 was the last here"):
        followers[0].wait(1)
    assert followers[0].read().version == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="files of another user can only be made by root")
def test_root_follows_no_files_of_another_user() -> None:
    def loop(context: RankContext, model: nn.Module, optimizer: Any) -> None:
        for slab in list_slabs():
            if slab.header is not None and slab.header.facts.run == context.run:
                os.chown(slab.path, 4711, -1)
        with pytest.raises(StallError, match="has no optimizers in /dev/shm"):
            rayzero.follow(context.run).read(timeout_s=0.05)

    alone(loop)
