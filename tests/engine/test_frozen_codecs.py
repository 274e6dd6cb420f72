"""What is frozen lies encoded with its owners (``ZeroConfig.cpu_compression``): ranks compute with what was kept."""

from __future__ import annotations

import copy
import logging
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import rayzero
from rayzero import ZeroConfig
from rayzero.checkpoint import CheckpointReader
from rayzero.codecs import CODECS, codec_for, record
from rayzero.config import CpuCompressionMethod
from rayzero.config.zero import Precision
from rayzero.convert.conversion import export_full
from rayzero.engine.context import RankContext, running_in
from rayzero.engine.prepare import plan_units
from rayzero.errors import MemoryPlanError, RayZeroError, StoreError
from rayzero.kernels import moments, splits_masters
from rayzero.layout.shard_map import shard_map_for
from rayzero.memory.planner import plan_owner
from rayzero.owner import shard as shard_module
from rayzero.slabs.slab import Slab
from rayzero.slabs.sweep import list_slabs
from rayzero.telemetry.names import MEMORY_BYTES, TRANSFER_BYTES, TRANSFER_RAW_BYTES
from rayzero.testing import Transport, run_ranks

from .models import Net, fit, frozen_base, prepared_frozen, same_bits

METHODS = [method.value for method in CpuCompressionMethod if method is not CpuCompressionMethod.NONE]
SHARD = 16384  # bytes: several shards a unit


def trained(base: Net, config: ZeroConfig) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """All weights as they were given to the owners and after three steps."""
    with running_in(RankContext()):
        model, optimizer = prepared_frozen(copy.deepcopy(base), config)
        given = rayzero.full_state_dict(model)
        fit(model, optimizer, range(3), max_norm=1.0)
        return given, rayzero.full_state_dict(model)


# ---- what is computed


@pytest.mark.promise("exact", "codecs")
@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
@pytest.mark.parametrize("method", METHODS)
def test_a_run_has_the_bits_of_a_plain_one_on_the_values_that_were_kept(
    method: str, precision: str, dtype: torch.dtype
) -> None:
    base = frozen_base(dtype)
    config = ZeroConfig(precision=precision, shard_bytes=SHARD)
    kept, after = trained(base, config.replace(cpu_compression=method))
    plain = copy.deepcopy(base)
    plain.load_state_dict(kept)
    assert same_bits(trained(plain, config)[1], after)
    lossy = CODECS[CpuCompressionMethod(method)].lossy and CODECS[CpuCompressionMethod(method)].takes(dtype)
    assert same_bits(kept, trained(base, config)[0]) is not lossy


def states_of(context: RankContext, base: Net) -> dict[str, Tensor]:
    model, optimizer = prepared_frozen(copy.deepcopy(base))
    fit(model, optimizer, range(3), context.rank, max_norm=1.0)
    return rayzero.full_state_dict(model)


@pytest.mark.spread(1)
@pytest.mark.parametrize("method", ["int8", "quantization", "lossless"])
def test_bits_do_not_depend_on_the_store_or_the_number_of_owners(method: str) -> None:
    base = frozen_base(torch.bfloat16)
    ways: list[tuple[Transport, int]] = [("inproc", 1), ("inproc", 3), ("shm", 2), ("grpc", 2)]
    found = []
    for transport, owners in ways:
        config = ZeroConfig(precision="bf16", cpu_compression=method, shard_bytes=SHARD)
        found += run_ranks(lambda context: states_of(context, base), 2, owners, transport, config=config)
    assert all(same_bits(one, found[0]) for one in found[1:])


# ---- memory


def wide(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(512, 2048, dtype=dtype), nn.Linear(2048, 8, dtype=dtype))
    model[0].requires_grad_(False)
    return model


@pytest.mark.promise("bounded", "codecs")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", ["none", *METHODS])
def test_owners_and_links_count_the_bytes_that_are_kept(method: str, dtype: torch.dtype) -> None:
    """The matrix as its codec says, the bias as it is."""
    precision: Precision = "fp32" if dtype is torch.float32 else "bf16"
    config = ZeroConfig(precision=precision, cpu_compression=method, units=("Linear",), shard_bytes=1 << 20)
    config = config.replace(async_prefetch=False)  # so that nothing is fetched while counters are read
    codec, base = codec_for(method, dtype), wide(dtype)
    matrix = base[0].weight.detach().reshape(-1)
    most = sum(codec.most_bytes(len(part), dtype) for part in matrix.split(1 << 18))
    exact = sum(codec.encode(part).numel() for part in matrix.split(1 << 18))
    assert exact <= most
    with running_in(RankContext()) as context:
        model, optimizer = prepared_frozen(base, config)
        model(torch.randn(4, 512, dtype=dtype)).sum().backward()
        optimizer.step()
        held, recorder = context.recorder.gauge(MEMORY_BYTES, kind="param", tier="shm"), context.recorder
        sent = recorder.total(TRANSFER_BYTES, direction="fetch")
        raw = recorder.total(TRANSFER_RAW_BYTES, direction="fetch")
        stats = rayzero.stats(model)
    trained = 0 if precision == "fp32" else aligned_bytes([8 * 2048, 8], 2)  # fp32 publishes its masters
    rest = 2048 * dtype.itemsize
    assert held == pytest.approx(exact + rest + trained, abs=64 * 16)  # headers
    if method == "none":
        assert sent == raw
    else:
        assert raw - sent == pytest.approx(matrix.numel() * dtype.itemsize - exact, abs=64 * 16)
        assert stats.to_device.stored_ratio == pytest.approx(sent / raw)
    master = 2 if precision == "bf16" and splits_masters("auto", "fp32") else 4
    states = (master + 8) * (8 * 2048 + 64)
    raw_kept = (matrix.numel() + 2048) * dtype.itemsize + trained + states
    assert stats.memory.owner_original_bytes == raw_kept
    assert stats.memory.kept_ratio == pytest.approx((held + states) / raw_kept, rel=0.01)


def aligned_bytes(numels: list[int], itemsize: int) -> int:
    return sum(-(-numel // 64) * 64 * itemsize for numel in numels)


@pytest.mark.parametrize("method", METHODS)
def test_no_page_of_shared_memory_is_kept_for_nothing(method: str) -> None:
    config = ZeroConfig(cpu_compression=method, units=("Linear",), shard_bytes=1 << 20)

    def loop(context: RankContext) -> tuple[int, float]:
        prepared_frozen(wide())
        slabs = [slab for slab in list_slabs() if slab.header is not None and slab.header.facts.role == "params"]
        ours = [slab for slab in slabs if slab.header.facts.layout_digest == plan_units(wide(), config).layout.digest]
        return sum(slab.path.stat().st_blocks * 512 for slab in ours), 0.0

    pages, _ = run_ranks(loop, 1, 1, "shm", config=config)[0]
    codec, base = codec_for(method, torch.float32), wide()
    exact = sum(codec.encode(part).numel() for part in base[0].weight.detach().reshape(-1).split(1 << 18))
    trained = aligned_bytes([8 * 2048, 8], 4)
    assert pages == pytest.approx(exact + 2048 * 4 + trained, rel=0.03)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", METHODS)
def test_the_plan_says_what_owners_keep(method: str, dtype: torch.dtype) -> None:
    precision: Precision = "fp32" if dtype is torch.float32 else "bf16"
    config = ZeroConfig(precision=precision, cpu_compression=method, units=("Linear",))
    held, _ = kept_and_planned(dtype, config)
    layout = plan_units(wide(dtype), config).layout
    plan = plan_owner(layout, shard_map_for(layout, 1, "balanced"), 0, 1, 1, splits=splits_masters("auto", "fp32"))
    if method == "lossless":
        assert held < plan.params
    else:
        assert held == pytest.approx(plan.params, abs=64 * 16)


def kept_and_planned(dtype: torch.dtype, config: ZeroConfig) -> tuple[float, int]:
    """Bytes of published parameters that the owner keeps, and what it says that it needs in all."""
    with running_in(RankContext()) as context:
        _, optimizer = prepared_frozen(wide(dtype), config)
        held = context.recorder.gauge(MEMORY_BYTES, kind="param", tier="shm")
        return held, optimizer.engine.store.connection.owners.services[0].planned_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", METHODS)
def test_a_loaded_owner_plans_with_the_bytes_that_it_measured(method: str, dtype: torch.dtype) -> None:
    precision: Precision = "fp32" if dtype is torch.float32 else "bf16"
    config = ZeroConfig(precision=precision, units=("Linear",))
    plain, all_of_it = kept_and_planned(dtype, config)
    held, planned = kept_and_planned(dtype, config.replace(cpu_compression=method))
    assert all_of_it - planned == pytest.approx(plain - held, abs=64 * 16)


# ---- checkpoints, writes, refusals


@pytest.mark.promise("recoverable", "codecs")
@pytest.mark.parametrize("then", ["none", "int8", "lossless"])
@pytest.mark.parametrize("first", ["none", "int8", "lossless"])
def test_a_checkpoint_of_any_resumes_with_any(tmp_path: Path, first: str, then: str) -> None:
    base = frozen_base(torch.bfloat16)
    config = ZeroConfig(precision="bf16", shard_bytes=SHARD)
    with running_in(RankContext()):
        model, optimizer = prepared_frozen(copy.deepcopy(base), config.replace(cpu_compression=first))
        fit(model, optimizer, range(3), max_norm=1.0)
        rayzero.save_checkpoint(optimizer, tmp_path / "ck", {})
        kept = rayzero.full_state_dict(model)
        fit(model, optimizer, range(3, 6), max_norm=1.0)
        expected = rayzero.full_state_dict(model)
    with CheckpointReader(tmp_path / "ck") as reader:
        reader.verify()
    exported = load_file(export_full(tmp_path / "ck", tmp_path / "out"))
    assert same_bits(exported, {name: kept[name] for name in exported})
    with running_in(RankContext(resume=tmp_path / "ck")):
        model, optimizer = prepared_frozen(frozen_base(torch.bfloat16), config.replace(cpu_compression=then))
        fit(model, optimizer, range(3, 6), max_norm=1.0)
        resumed = rayzero.full_state_dict(model)
    assert same_bits(resumed, expected) or (first, then) in (("none", "int8"), ("lossless", "int8"))
    for name, value in expected.items():
        torch.testing.assert_close(resumed[name], value, atol=2e-2, rtol=0.05)


def test_a_checkpoint_is_written_without_decoding_everything_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ZeroConfig(cpu_compression="int8", moments="int8", shard_bytes=SHARD)
    alive: list[weakref.ref[Tensor]] = []
    most = 0
    decode, read = record.read_record, moments.CodedMoment.read

    def count(values: Tensor) -> None:
        nonlocal most
        alive.append(weakref.ref(values))
        most = max(most, sum(one().nbytes for one in alive if one() is not None))

    def counted_record(*args: Any) -> None:
        decode(*args)
        count(args[-1])

    def counted_moment(self: Any, start: int, stop: int) -> Tensor:
        values: Tensor = read(self, start, stop)
        count(values)
        return values

    with running_in(RankContext()):
        model, optimizer = prepared_frozen(frozen_base(), config)
        fit(model, optimizer, range(1), max_norm=1.0)
        monkeypatch.setattr(shard_module, "read_record", counted_record)
        monkeypatch.setattr(moments.CodedMoment, "read", counted_moment)
        rayzero.save_checkpoint(optimizer, tmp_path / "ck", {})
    assert len(alive) > 10
    assert most <= 2 * SHARD


def test_what_is_written_into_a_frozen_parameter_is_kept_encoded_and_computed_with() -> None:
    config = ZeroConfig(cpu_compression="int8", shard_bytes=SHARD)
    base = frozen_base()

    def loop(context: RankContext) -> dict[str, Tensor]:
        model, optimizer = prepared_frozen(copy.deepcopy(base))
        fit(model, optimizer, range(1), context.rank, max_norm=1.0)
        with torch.no_grad():
            model.layers[1].up.weight[0, :3] = 0.3
        fit(model, optimizer, range(1, 2), context.rank, max_norm=1.0)
        kept = rayzero.full_state_dict(model)
        with rayzero.full_parameters(model):
            used = {name: param.detach().clone() for name, param in model.named_parameters()}
        assert same_bits({name: kept[name] for name in used}, used)
        return kept

    found = [run_ranks(loop, 2, 2, transport, config=config) for transport in ("inproc", "shm")]
    assert all(same_bits(one, found[0][0]) for ranks in found for one in ranks)
    assert found[0][0]["layers.1.up.weight"][0, :3].tolist() == pytest.approx([0.3] * 3, rel=0.01)


def test_a_record_has_its_pages_before_it_is_written_or_says_that_there_are_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(slab: Slab, offset: int, size: int) -> None:
        raise MemoryPlanError(f"no room for {size} bytes")

    with running_in(RankContext()):
        model, optimizer = prepared_frozen(wide(), ZeroConfig(cpu_compression="lossless", units=("Linear",)))
        model(torch.randn(4, 512)).sum().backward()
        with torch.no_grad():
            model[0].weight[0, 0] = 1.0
        monkeypatch.setattr(Slab, "allocate", full)
        with pytest.raises(RayZeroError, match=r"no room for 4,?[0-9]+ bytes"):
            optimizer.step()


@pytest.mark.promise("refused", "codecs")
def test_values_that_a_codec_cannot_hold_are_refused_by_name() -> None:
    base = wide()
    with torch.no_grad():
        base[0].weight[7, 7] = 1e6
    with running_in(RankContext()), pytest.raises(StoreError) as caught:
        prepared_frozen(base, ZeroConfig(cpu_compression="fp16"))
    line = str(caught.value)
    assert line == "cpu_compression='fp16' cannot hold '0.weight', whose largest finite magnitude is 1e+06; " + (
        "use 'bf16' or 'lossless'"
    )


@pytest.mark.parametrize(
    ("method", "precision", "frozen", "said"),
    [
        ("int8", "fp32", True, "cpu_compression='int8' replaces the values of 2 frozen parameters"),
        ("int8", "fp32", False, "cpu_compression='int8' has no effect: the model has no frozen parameters"),
        ("bf16", "bf16", True, "it does not make the frozen parameters' dtype smaller"),
        ("lossless", "bf16", True, ""),
    ],
)
def test_it_says_what_is_lost_and_what_has_no_effect(
    method: str, precision: Precision, frozen: bool, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    base = wide(torch.bfloat16 if precision == "bf16" else torch.float32)
    base[0].requires_grad_(not frozen)
    with running_in(RankContext()), caplog.at_level(logging.WARNING):
        prepared_frozen(base, ZeroConfig(cpu_compression=method, precision=precision))
    warned = [one.getMessage() for one in caplog.records if "cpu_compression" in one.getMessage()]
    assert len(warned) == bool(said)
    assert all(said in message for message in warned)
