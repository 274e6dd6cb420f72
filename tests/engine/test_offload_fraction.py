"""A part of the optimizer on the ranks' devices: same numbers, same checkpoints, the stated bytes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rayzero
from rayzero import ZeroConfig
from rayzero.engine.context import RankContext, running_in
from rayzero.errors import ConfigError
from rayzero.layout.shard_map import device_shards
from rayzero.owner.service import ShardService
from rayzero.protocol.ownership import owner_map
from rayzero.store.inprocess import LocalConnection, LocalOwners
from rayzero.store.rank.rank_store import RankStore
from rayzero.telemetry.names import MEMORY_BYTES
from rayzero.telemetry.recorder import MemoryRecorder
from rayzero.testing import run_ranks

from .models import Net, fit, prepared_copy, same_bits, seeded, token_loss, tokens

MAX_NORM = 0.5
SMALL = ZeroConfig(shard_bytes=16 << 10, min_unit_bytes=1 << 12)  # several shards a unit

adamw = partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1)
sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def loop(
    context: RankContext, base: nn.Module, make: Any = adamw, *, steps: int = 4, poisoned: int = -1, backwards: int = 1
) -> tuple[dict[str, Tensor], list[float], dict[str, Any]]:
    """Clipped training on one rank: complete weights, norms, the optimizer's state."""
    model, optimizer = prepared_copy(base, make)
    norms = []
    for step in range(steps):
        for backward in range(backwards):
            loss = token_loss(model, tokens(step + 10 * backward, context.rank))
            (loss * float("nan") if step == poisoned else loss).backward()
        norms.append(float(optimizer.clip_grad_norm_(MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
    return rayzero.full_state_dict(model), norms, optimizer.state_dict()


def same_states(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    flat = [[value for state in found["state"].values() for value in state.values()] for found in (ours, theirs)]
    return len(flat[0]) == len(flat[1]) and all(torch.equal(a, b) for a, b in zip(*flat, strict=True))


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("settings", [{}, {"precision": "bf16"}, {"gradient_accumulation_steps": 2}], ids=str)
@pytest.mark.parametrize("fraction", [0.6, 0.0])
def test_bits_norms_and_states_are_those_of_an_optimizer_on_the_host(fraction, settings, world_size):
    base = seeded(Net)
    config = SMALL.replace(**settings)
    backwards = config.gradient_accumulation_steps
    want = run_ranks(lambda ctx: loop(ctx, base, backwards=backwards), world_size, 2, config=config)[0]
    assert min(want[1]) > MAX_NORM, "clipping must trigger"
    config = config.replace(offload_fraction=fraction)
    for state, norms, states in run_ranks(
        lambda ctx: loop(ctx, base, backwards=backwards), world_size, 2, config=config
    ):
        assert same_bits(state, want[0])
        assert norms == want[1]
        assert same_states(states, want[2])


def test_any_element_wise_optimizer_and_a_skipped_step():
    base = seeded(Net)
    want, got = (
        run_ranks(lambda ctx: loop(ctx, base, sgd, poisoned=1), 2, 2, config=SMALL.replace(offload_fraction=f))
        for f in (1.0, 0.5)
    )
    assert same_bits(got[0][0], want[0][0])
    assert same_states(got[0][2], want[0][2])


@pytest.mark.spread(1)
@pytest.mark.parametrize("transport", ["grpc", "shm"])
@pytest.mark.parametrize("backwards", [1, 3])
def test_bits_do_not_depend_on_the_transport(transport, backwards):
    base, several = seeded(Net), SMALL.replace(gradient_accumulation_steps=backwards)

    def train(ctx: RankContext) -> dict[str, Tensor]:
        return loop(ctx, base, steps=2, backwards=backwards)[0]

    want = run_ranks(train, 2, 2, config=several)[0]
    for state in run_ranks(train, 2, 1, transport, config=several.replace(offload_fraction=0.5)):
        assert same_bits(state, want)


def _beside(context: RankContext) -> dict[str, Tensor]:
    return loop(context, seeded(Net), steps=2)[0]


def test_alone_and_without_offload_optimizer_states():
    want = run_ranks(_beside, 1, 1, config=SMALL)[0]
    for settings in ({"offload_fraction": 0.5}, {"offload_optimizer_states": False}):
        with running_in(RankContext(config=SMALL.replace(**settings))) as context:
            assert same_bits(_beside(context), want)


# ---- what lies where


@pytest.fixture
def beside() -> Iterator[tuple[LocalOwners, MemoryRecorder]]:
    """Two owners on the host, one beside the only rank; a Net is prepared over them with half of its optimizer."""
    recorder = MemoryRecorder()
    owners = LocalOwners(2, recorder=recorder, devices=[torch.device("cpu")])
    config = SMALL.replace(offload_fraction=0.5)
    store = RankStore(LocalConnection(0, owners))
    with running_in(RankContext(connect=lambda _: store, config=config)) as context:
        loop(context, seeded(Net), steps=1)
        yield owners, recorder
    owners.close()


def shards_of(service: ShardService) -> list[Any]:
    return list(service._attached().model.shards.values())


def test_what_forward_uses_first_stays_on_the_device_and_never_more_than_its_share(beside):
    owners, _ = beside
    *hosts, device = owners.services
    spec = device._attached().model.spec
    trained = sum(shard.numel for shard in spec.layout.shards)
    mine = [owned.shard for owned in shards_of(device)]
    assert [shard.index for shard in mine] == list(range(len(mine)))  # shards are numbered in forward order
    kept = sum(shard.numel for shard in mine)
    assert trained / 2 - spec.layout.shard_numel < kept <= trained / 2
    assert kept + sum(o.shard.numel for host in hosts for o in shards_of(host)) == trained
    assert owner_map(spec, 3).num_device_owners == 1


def test_masters_and_moments_take_twelve_bytes_an_element_there_and_none_on_the_host(beside):
    owners, recorder = beside
    *hosts, device = owners.services
    kept = sum(owned.shard.numel for owned in shards_of(device))
    plan = device._attached().model.plan
    assert (plan.on_device, plan.master, plan.moments, plan.params) == (12 * kept, 0, 0, 4 * kept)
    assert all(host._attached().model.plan.on_device == 0 for host in hosts)
    for owned in shards_of(device):  # fp32: published values are a copy, on the host
        assert owned.master.data_ptr() != owned.params.data_ptr()
        assert torch.equal(owned.master, owned.params)
    held = {reading.labels["kind"]: reading.value for reading in _memory(device, recorder)}
    assert held["master"] == held["exp_avg"] == held["exp_avg_sq"] == 4 * kept


def _memory(service: ShardService, recorder: MemoryRecorder) -> list[Any]:
    return [r for r in service._readings() if r.metric is MEMORY_BYTES and r.labels["tier"] == "ram"]


@pytest.mark.parametrize(("fraction", "count"), [(1.0, 0), (0.999, 0), (0.75, 1), (0.5, 2), (0.3, 2), (0.0, 4)])
def test_whole_shards_as_many_as_the_share_holds(fraction, count):
    from rayzero.layout.model_layout import ModelLayout, lay_out_unit

    units = [lay_out_unit(i, f"u{i}", torch.float32, i != 1, [(f"w{i}", (64,))]) for i in range(5)]
    layout = ModelLayout(units=tuple(units), shard_numel=64)
    assert device_shards(layout, fraction) == [0, 2, 3, 4][:count]  # unit 1 is frozen: it has no optimizer


def test_a_fraction_that_the_runs_owners_were_not_started_for_is_refused():
    base = seeded(Net)

    def prepare(context: RankContext) -> None:
        rayzero.prepare(copy.deepcopy(base), adamw(base.parameters()), SMALL.replace(offload_fraction=0.5))

    with pytest.raises(ConfigError, match=r"offload_fraction=0\.5 was given to rayzero\.prepare\(\)"):
        run_ranks(prepare, 1, 1)


def test_what_stays_on_the_devices_is_told_and_nothing_at_all_is_a_warning(caplog):
    def prepare(fraction: float, *, trained: bool = True) -> list[tuple[str, str]]:
        caplog.clear()
        model = seeded(Net).requires_grad_(trained)
        with caplog.at_level("INFO", "rayzero.engine.prepare"), running_in(RankContext()):
            rayzero.prepare(model, adamw(model.parameters()), SMALL.replace(offload_fraction=fraction))
        return [(record.levelname, record.getMessage()) for record in caplog.records]

    ((level, message),) = prepare(0.0)
    assert level == "INFO"
    assert message.startswith("offload_fraction=0: 1 of the optimizer stays on the ranks' devices, in whole shards")
    ((level, message),) = prepare(0.9999)
    assert level == "WARNING"
    assert message.endswith("; lower shard_bytes or offload_fraction")
    assert prepare(1.0) == []
    assert prepare(0.0, trained=False) == [], "there is nothing to keep, and no setting would change that"


# ---- checkpoints


@pytest.mark.spread(2)
@pytest.mark.parametrize(("first", "then"), [(0.5, 1.0), (1.0, 0.3), (0.0, 0.6)])
def test_a_checkpoint_of_one_fraction_goes_on_with_another(first, then, tmp_path: Path):
    base = seeded(Net)

    def part(context: RankContext, start: int, stop: int) -> tuple[dict[str, Tensor], str]:
        model, optimizer = prepared_copy(base, adamw)
        fit(model, optimizer, range(start, stop), context.rank, max_norm=MAX_NORM)
        info = rayzero.save_checkpoint(optimizer, tmp_path / f"{first}-{start}" / f"step-{stop:06}", {})
        return rayzero.full_state_dict(model), info.digest

    def run(fraction: float, start: int, stop: int, resume: Path | None) -> tuple[dict[str, Tensor], str]:
        config = SMALL.replace(offload_fraction=fraction)
        return run_ranks(lambda ctx: part(ctx, start, stop), 2, 2, config=config, resume=resume)[0]

    whole = run(1.0, 0, 4, None)
    run(first, 0, 2, None)
    state, digest = run(then, 2, 4, tmp_path / f"{first}-0" / "step-000002")
    assert same_bits(state, whole[0])
    assert digest == whole[1]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_states_are_written_and_read_beside_a_rank_as_anywhere(precision):
    base = seeded(Net)
    config = SMALL.replace(precision=precision)
    trained = run_ranks(lambda ctx: loop(ctx, base, steps=3), 1, 1, config=config)[0][2]

    def load(context: RankContext) -> tuple[dict[str, Tensor], dict[str, Any]]:
        model, optimizer = prepared_copy(base, adamw)
        optimizer.load_state_dict(trained)
        with torch.no_grad():
            model.layers[0].up.weight[0].mul_(0.5)  # what else its unit has keeps fp32 masters
        fit(model, optimizer, [9])
        return rayzero.full_state_dict(model), optimizer.state_dict()

    want, got = (run_ranks(load, 1, 1, config=config.replace(offload_fraction=f))[0] for f in (1.0, 0.0))
    assert same_bits(got[0], want[0])
    assert same_states(got[1], want[1])


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_on_cuda_states_lie_on_the_device_and_weights_are_those_of_the_host(precision):
    base = seeded(lambda: Net(num_layers=4, width=256)).cuda()
    results = []
    for fraction in (1.0, 0.5, 0.0):
        recorder = MemoryRecorder()
        config = SMALL.replace(precision=precision, offload_fraction=fraction)
        with running_in(RankContext(config=config, recorder=recorder)):
            model, optimizer = prepared_copy(base, adamw)
            for step in range(5):
                inputs, targets = tokens(step)
                token_loss(model, (inputs.cuda(), targets.cuda())).backward()
                optimizer.clip_grad_norm_(MAX_NORM)
                optimizer.step()
                optimizer.zero_grad()
            results.append(rayzero.full_state_dict(model))
            trained = sum(p.numel() for p in base.parameters())
            on_gpu = recorder.gauge(MEMORY_BYTES, kind="exp_avg", tier="gpu") if fraction < 1 else 0
            assert on_gpu <= 4 * trained * (1 - fraction)
            assert bool(on_gpu) == (fraction < 1)
    for state in results[1:]:
        for name, tensor in state.items():  # the device's fused kernel rounds in its own way
            torch.testing.assert_close(tensor, results[0][name], rtol=1e-5, atol=1e-6)
