"""Training with Adam's moments in codes (``ZeroConfig.moments``)."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rayzero
from rayzero import ZeroConfig
from rayzero.checkpoint import CheckpointReader
from rayzero.engine.context import RankContext, get_context, running_in
from rayzero.errors import UnsupportedError
from rayzero.kernels import splits_masters
from rayzero.kernels.moments import moment_bytes
from rayzero.telemetry.names import MEMORY_BYTES
from rayzero.testing import Transport, run_ranks

from .models import Net, fit, prepared_copy, same_bits, seeded

CODED = ["bf16", "int8"]
SHARD = 16384  # bytes: several shards a unit


def prepared(config: ZeroConfig | None = None) -> tuple[nn.Module, Any]:
    return prepared_copy(seeded(Net, seed=get_context().rank), torch.optim.AdamW, config, lr=3e-3)


def trained(config: ZeroConfig, steps: int = 60) -> list[float]:
    with running_in(RankContext()):
        model, optimizer = prepared(config)
        losses = fit(model, optimizer, [step % 4 for step in range(steps)], max_norm=1.0)
        return [float(loss) for loss in losses]


@pytest.mark.spread(1)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("moments", CODED)
def test_it_learns_as_with_moments_in_fp32(moments: str, precision: str) -> None:
    exact = trained(ZeroConfig(precision=precision))
    coded = trained(ZeroConfig(precision=precision, moments=moments))
    assert coded != exact
    assert coded[-1] < 0.5 * coded[0]
    assert sum(coded[-8:]) == pytest.approx(sum(exact[-8:]), rel=0.02)


def states_of(context: RankContext, base: Net) -> dict[str, Tensor]:
    model, optimizer = prepared_copy(base, torch.optim.AdamW, lr=3e-3)
    fit(model, optimizer, range(3), context.rank, max_norm=1.0)
    found = {
        f"{i}.{name}": value for i, state in optimizer.state_dict()["state"].items() for name, value in state.items()
    }
    return {**rayzero.full_state_dict(model), **found}


@pytest.mark.promise("exact", "moments")
@pytest.mark.spread(1)
@pytest.mark.parametrize("moments", CODED)
def test_bits_do_not_depend_on_the_store_or_the_number_of_owners(moments: str) -> None:
    base = seeded(Net)
    first: dict[str, Tensor] | None = None
    ways: list[tuple[Transport, int, int]] = [
        ("inproc", 1, 8 << 20),
        ("inproc", 3, SHARD),
        ("shm", 2, SHARD),
        ("grpc", 2, SHARD),
    ]
    for transport, owners, shard_bytes in ways:
        config = ZeroConfig(moments=moments, shard_bytes=shard_bytes, precision="bf16")
        results = run_ranks(lambda context: states_of(context, base), 2, owners, transport, config=config)
        first = first or results[0]
        assert same_bits(results[0], first), (transport, owners)
        assert same_bits(results[1], first), (transport, owners)


@pytest.mark.promise("recoverable", "moments")
@pytest.mark.parametrize("held", ["fp32", "kept"])
@pytest.mark.parametrize(("first", "then"), [("int8", "int8"), ("bf16", "bf16"), ("int8", "fp32"), ("fp32", "int8")])
def test_a_checkpoint_of_either_resumes_with_either(tmp_path: Path, first: str, then: str, held: str) -> None:
    with running_in(RankContext()):
        model, optimizer = prepared(ZeroConfig(moments=first, checkpoint_moments=held, shard_bytes=SHARD))
        fit(model, optimizer, range(3), max_norm=1.0)
        info = rayzero.save_checkpoint(optimizer, tmp_path / "step-000003", {})
        fit(model, optimizer, range(3, 6), max_norm=1.0)
        expected = rayzero.full_state_dict(model)
    with CheckpointReader(tmp_path / "step-000003") as reader:
        reader.verify()
    with running_in(RankContext(resume=tmp_path / "step-000003")):
        model, optimizer = prepared(ZeroConfig(moments=then, shard_bytes=SHARD))
        again = rayzero.save_checkpoint(optimizer, tmp_path / "again" / "step-000003", {})
        fit(model, optimizer, range(3, 6), max_norm=1.0)
        resumed = rayzero.full_state_dict(model)
    if first == then:
        assert same_bits(resumed, expected)
    if first != "fp32" and held == "fp32":  # what was rounded once is not rounded again
        assert again is not None
        assert info is not None
        assert again.digest == info.digest
    for name, value in expected.items():
        torch.testing.assert_close(resumed[name], value, atol=3e-3, rtol=0.05)


@pytest.mark.parametrize("moments", CODED)
def test_a_checkpoint_of_what_is_kept_is_as_small_as_what_is_kept(tmp_path: Path, moments: str) -> None:
    sizes, digests = {}, {}
    for held in ("fp32", "kept"):
        with running_in(RankContext()):
            model, optimizer = prepared(ZeroConfig(moments=moments, checkpoint_moments=held, shard_bytes=SHARD))
            fit(model, optimizer, range(2), max_norm=1.0)
            rayzero.save_checkpoint(optimizer, tmp_path / held / "step-000002", {})
        with CheckpointReader(tmp_path / held / "step-000002") as reader:
            reader.verify()
            names = [slot.name for unit in reader.layout.units for slot in unit.slots]
            pieces = [piece for kind in ("exp_avg", "exp_avg_sq") for n in names for piece in
                      reader.manifest.pieces[n, kind]]  # fmt: skip
            sizes[held] = sum(piece.decl.size_bytes for piece in pieces)
            numel = sum(piece.stop - piece.start for piece in pieces)
            digests[held] = {
                (name, kind): reader.read_slice(name, kind, 0, reader.manifest.pieces[name, kind][-1].stop)
                for kind in ("exp_avg", "exp_avg_sq")
                for name in names
            }
            name = "layers.1.up.weight"
            part = reader.read_slice(name, "exp_avg_sq", 37, 201)
            assert torch.equal(part, digests[held][name, "exp_avg_sq"][37:201]), "from the middle of a block"
    assert sizes["fp32"] == 4 * numel
    assert sizes["kept"] == pytest.approx(moment_bytes(moments) * numel, rel=0.03)
    assert all(torch.equal(value, digests["fp32"][key]) for key, value in digests["kept"].items())


@pytest.mark.promise("bounded", "moments")
@pytest.mark.parametrize("moments", ["fp32", *CODED])
def test_the_owner_counts_the_bytes_that_it_keeps(moments: str) -> None:
    with running_in(RankContext()) as context:
        model, optimizer = prepared(ZeroConfig(moments=moments, precision="bf16"))
        fit(model, optimizer, range(1), max_norm=1.0)
        held = {kind: context.recorder.gauge(MEMORY_BYTES, kind=kind) for kind in ("master", "exp_avg", "exp_avg_sq")}
    master = 2 if splits_masters("auto", moments) else 4
    assert held["exp_avg"] == held["exp_avg_sq"] == held["master"] / master * moment_bytes(moments)


@pytest.mark.promise("refused", "moments")
def test_optimizers_without_such_moments_are_refused_before_anything_changes() -> None:
    with running_in(RankContext()):
        model = seeded(Net)
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(UnsupportedError, match="moments='int8' is for Adam and AdamW, not for SGD"):
            rayzero.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), ZeroConfig(moments="int8"))
        with pytest.raises(UnsupportedError, match="amsgrad=True"):
            rayzero.prepare(model, torch.optim.Adam(model.parameters(), amsgrad=True), ZeroConfig(moments="int8"))
        assert same_bits(model.state_dict(), before)
