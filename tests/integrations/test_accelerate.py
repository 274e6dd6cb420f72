"""A plain Accelerate loop with another accelerator class learns what it learns with Accelerate's own."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from engine.models import VOCAB, Net, relative_difference, same_bits, seeded, tight
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import rayzero
from rayzero import ZeroConfig
from rayzero.engine.context import RankContext
from rayzero.errors import ConfigError, UnsupportedError
from rayzero.integrations.accelerate import ZeroAccelerator
from rayzero.testing import run_ranks

from .conftest import reset_accelerate

pytestmark = pytest.mark.usefixtures("fresh_accelerate")


def loader(size: int = 24, batch_size: int = 4, **settings: Any) -> DataLoader[Any]:
    """Examples of 8 tokens and 8 targets."""
    both = torch.randint(0, VOCAB, (2, size, 8), generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(both[0], both[1]), batch_size=batch_size, **settings)


def loop(
    accelerator: Accelerator, base: nn.Module, *, max_norm: float | None, batch_size: int = 4, warmup: float = 0.1
) -> Any:
    """Two epochs as Accelerate's documentation writes them; the model, and the lr and norm of each step."""
    model = copy.deepcopy(base)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, warmup, total_iters=4)
    model, optimizer, batches, scheduler = accelerator.prepare(
        model, optimizer, loader(batch_size=batch_size, shuffle=True, generator=torch.Generator()), scheduler
    )
    logged = []
    for _ in range(2):
        for inputs, targets in batches:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(inputs).flatten(0, 1).float(), targets.flatten())
                accelerator.backward(loss)
                if accelerator.sync_gradients and max_norm is not None:
                    logged.append(float(accelerator.clip_grad_norm_(model.parameters(), max_norm)))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            logged.append(scheduler.get_last_lr()[0])
    return model, logged


@pytest.mark.promise("observable", "integrations")
def test_an_accelerate_loop_has_stats(alone: RankContext) -> None:
    model, logged = loop(ZeroAccelerator(zero_config=ZeroConfig()), seeded(Net), max_norm=None)
    found = rayzero.stats(model)
    assert found.steps.count == found.forwards == found.backwards == len(logged) == 12
    assert found.layers["layers.0"].backward.count == 12
    assert found.waits["push"].count > 0


@pytest.mark.promise("exact", "integrations")
@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("accumulated", [1, 4])
def test_a_loop_gives_the_same_bits(precision: str, accumulated: int, alone: RankContext) -> None:
    """Six batches an epoch: with four accumulated, the last two are a step of their own."""
    base = seeded(Net)
    settings: dict[str, Any] = {
        "cpu": True,
        "gradient_accumulation_steps": accumulated,
        "mixed_precision": precision,
    }
    plain, expected = loop(Accelerator(**settings), base, max_norm=None)
    config = tight(base, prefetch_buffer_size=1, spare=0)
    model, logged = loop(ZeroAccelerator(**settings, zero_config=config), base, max_norm=None)
    assert same_bits(rayzero.full_state_dict(model), dict(plain.state_dict()))
    assert logged == expected


def test_clipping_gives_the_same_norms_and_weights(alone: RankContext) -> None:
    base = seeded(Net)
    plain, expected = loop(Accelerator(cpu=True), base, max_norm=0.5)
    model, logged = loop(ZeroAccelerator(cpu=True), base, max_norm=0.5)
    assert relative_difference(rayzero.full_state_dict(model), dict(plain.state_dict())) <= 1e-6
    assert logged == pytest.approx(expected, rel=1e-6)


def test_get_state_dict_gives_masters(alone: RankContext, tmp_path: Path) -> None:
    accelerator = ZeroAccelerator(cpu=True, zero_config=ZeroConfig(precision="bf16"))
    model, _ = loop(accelerator, seeded(Net), max_norm=None)
    assert same_bits(accelerator.get_state_dict(model), rayzero.full_state_dict(model))
    other = nn.Linear(2, 2)
    assert same_bits(accelerator.get_state_dict(other), dict(other.state_dict()))


def muon_and_adamw(model: Net) -> list[torch.optim.Optimizer]:
    matrices = [param for param in model.layers.parameters() if param.dim() == 2]
    known = set(map(id, matrices))
    others = [param for param in model.parameters() if id(param) not in known]
    return [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(others)]


def test_a_list_of_optimizers_is_one_argument_and_one_optimizer(alone: RankContext, tmp_path: Path) -> None:
    """Schedulers of both are prepared with it, as Accelerate alone does with each."""

    def train(accelerator: Accelerator, model: nn.Module, optimizers: Any, schedulers: Any, batches: Any) -> None:
        for inputs, targets in batches:
            accelerator.backward(F.cross_entropy(model(inputs).flatten(0, 1).float(), targets.flatten()))
            for each in (*optimizers, *schedulers):
                each.step()
            for each in optimizers:
                each.zero_grad()

    def made() -> tuple[Net, Any, Any]:
        model = seeded(Net)
        given = muon_and_adamw(model)
        return model, given, [torch.optim.lr_scheduler.ExponentialLR(each, 0.8) for each in given]

    plain, given, schedulers = made()
    accelerator = Accelerator(cpu=True)
    plain, *rest = accelerator.prepare(plain, *given, *schedulers, loader())
    train(accelerator, plain, rest[:2], rest[2:4], rest[4])
    reset_accelerate()
    ours, given, schedulers = made()
    accelerator = ZeroAccelerator(cpu=True, zero_config=tight(ours))
    ours, optimizer, *rest = accelerator.prepare(ours, given, *schedulers, loader())
    train(accelerator, ours, [optimizer], rest[:2], rest[2])
    assert same_bits(rayzero.full_state_dict(ours), plain.state_dict())
    accelerator.save_state(str(tmp_path / "saved"))
    train(accelerator, ours, [optimizer], rest[:2], rest[2])
    expected = rayzero.full_state_dict(ours)
    accelerator.load_state(str(tmp_path / "saved"))
    train(accelerator, ours, [optimizer], rest[:2], rest[2])
    assert same_bits(rayzero.full_state_dict(ours), expected)


# ---- several ranks ----------------------------------------------------------------------------------------------


def inputs_of(batches: Any) -> list[Tensor]:
    return [inputs for inputs, _ in batches]


def same_batches(got: list[Tensor], want: list[Tensor]) -> bool:
    return len(got) == len(want) and all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_a_rank_reads_its_part_and_exchanges_nothing() -> None:
    everything = inputs_of(loader())

    def rank(context: RankContext) -> None:
        if context.rank == 0:
            return
        accelerator = ZeroAccelerator(cpu=True)
        assert (accelerator.process_index, accelerator.num_processes) == (1, 2)
        assert not accelerator.is_main_process
        assert same_batches(inputs_of(accelerator.prepare(loader())), everything[1::2])
        with accelerator.whole_data():
            whole = accelerator.prepare(loader())
        assert same_batches([accelerator.gather_for_metrics(batch)[0] for batch in whole], everything)
        for call in (accelerator.gather, accelerator.gather_for_metrics, accelerator.reduce):
            with pytest.raises(UnsupportedError, match=rf"accelerator\.{call.__name__}\(\) needs the other ranks"):
                call(torch.zeros(1))
        with pytest.raises(UnsupportedError, match=r"wait_for_everyone\(\) needs the other ranks"):
            accelerator.wait_for_everyone()
        for batch in accelerator.prepare(loader()):
            with pytest.raises(UnsupportedError, match="needs the other ranks"):
                accelerator.gather_for_metrics(batch)

    run_ranks(rank, 2, 1)


def test_ranks_shuffle_alike_whatever_their_generators_say() -> None:
    def rank(context: RankContext) -> list[list[Tensor]]:
        if context.rank == 1:
            return []
        epochs = []
        for seed in (1, 2):  # what two ranks may have
            torch.manual_seed(seed)
            prepared = ZeroAccelerator(cpu=True).prepare(loader(shuffle=True))
            epochs.append([*inputs_of(prepared), *inputs_of(prepared)])
        return epochs

    (one, other), _ = run_ranks(rank, 2, 1)
    assert same_batches(one, other)
    assert not same_batches(one[:3], one[3:]), "epochs are shuffled differently"


def test_an_iterable_dataset_is_split_by_rank() -> None:
    class Count(torch.utils.data.IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(12))

    def rank(context: RankContext) -> list[Tensor]:
        if context.rank == 0:
            return []
        return list(ZeroAccelerator(cpu=True).prepare(DataLoader(Count(), batch_size=3)))

    _, batches = run_ranks(rank, 2, 1)
    assert [batch.tolist() for batch in batches] == [[3, 4, 5], [9, 10, 11]]


def test_two_ranks_in_one_process_are_refused() -> None:
    made, refused = threading.Event(), threading.Event()

    def rank(context: RankContext) -> None:
        if context.rank == 0:
            ZeroAccelerator(cpu=True)
            made.set()
            assert refused.wait(60)
            return
        assert made.wait(60)
        try:
            ZeroAccelerator(cpu=True)
        finally:
            refused.set()

    with pytest.raises(UnsupportedError, match=r"rank 0 uses Accelerate in this process already.*processes=True"):
        run_ranks(rank, 2, 1)


def with_collectives(context: RankContext) -> tuple[dict[str, Tensor], Tensor]:
    """Train where the user made a torch.distributed group; the state, and every rank's index gathered."""
    os.environ |= {
        "RANK": str(context.rank),
        "LOCAL_RANK": str(context.rank),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
    }
    assert context.run_dir is not None
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{context.run_dir}/group", rank=context.rank, world_size=2
    )
    accelerator = ZeroAccelerator(cpu=True, zero_config=tight(Net(), spare=0))
    model, _ = loop(accelerator, seeded(Net), max_norm=0.5, batch_size=2, warmup=1.0)
    ranks = accelerator.gather(torch.tensor([accelerator.process_index]))
    state = rayzero.full_state_dict(model)
    context.rank = 1 - context.rank
    with pytest.raises(ConfigError, match=r"Accelerate is process \d of 2 .* context is rank \d of 2"):
        ZeroAccelerator(cpu=True)
    torch.distributed.destroy_process_group()
    return state, ranks


@pytest.mark.thorough
@pytest.mark.usefixtures("forked_with_trainers")
def test_a_torch_distributed_group_of_the_ranks_serves_for_gathering(tmp_path: Path) -> None:
    """At a constant lr: Accelerate's schedulers step once a process."""
    plain, _ = loop(Accelerator(cpu=True), seeded(Net), max_norm=0.5, warmup=1.0)
    (one, ranks), (other, _) = run_ranks(with_collectives, 2, 2, "grpc", processes=True, run_dir=tmp_path)
    assert ranks.tolist() == [0, 1]
    assert same_bits(one, other)
    assert relative_difference(one, dict(plain.state_dict())) <= 1e-5


# ---- refused ----------------------------------------------------------------------------------------------------


def make() -> tuple[Net, torch.optim.Optimizer]:
    model = Net()
    return model, torch.optim.AdamW(model.parameters())


def test_model_and_optimizer_must_come_together(alone: RankContext) -> None:
    accelerator = ZeroAccelerator(cpu=True)
    model, optimizer = make()
    for objects, counts in (
        ((model,), "1 model and 0 optimizers"),
        ((optimizer,), "0 models and 1 optimizer"),
        ((model, Net(), optimizer), "2 models and 1 optimizer"),
        ((model, *muon_and_adamw(model)), "1 model and 2 optimizers.* or a list of its optimizers"),
    ):
        with pytest.raises(UnsupportedError, match=f"was given {counts}.*in one call"):
            accelerator.prepare(*objects)


def test_prepared_objects_may_be_prepared_again(alone: RankContext) -> None:
    accelerator = ZeroAccelerator(cpu=True)
    model, optimizer = accelerator.prepare(*make())
    accelerator.free_memory()
    assert accelerator.prepare(model, optimizer) == (model, optimizer)
    model(torch.zeros(1, 2, dtype=torch.long)).sum().backward()
    assert accelerator.clip_grad_norm_(model.parameters(), 1.0) > 0


def test_only_the_norm_of_all_gradients_is_clipped(alone: RankContext) -> None:
    accelerator = ZeroAccelerator(cpu=True)
    model, _ = accelerator.prepare(*make())
    with pytest.raises(UnsupportedError, match=r"given 1 parameters, which are not all.*model\.parameters"):
        accelerator.clip_grad_norm_(model.embed.weight, 1.0)
    with pytest.raises(UnsupportedError, match="norm_type=inf is not supported; use 2"):
        accelerator.clip_grad_norm_(model.parameters(), 1.0, norm_type=float("inf"))


def test_loss_scaling_is_refused(alone: RankContext) -> None:
    accelerator = ZeroAccelerator(cpu=True)
    accelerator.state._mixed_precision = "fp16"  # Accelerate itself takes it on CUDA only
    with pytest.raises(UnsupportedError, match="mixed_precision='fp16' is not supported yet; use 'bf16'"):
        accelerator.join_run(None, None)


def test_dispatching_batches_is_refused() -> None:
    from accelerate.utils import DataLoaderConfiguration

    def rank(context: RankContext) -> None:
        if context.rank == 1:
            ZeroAccelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=True))

    with pytest.raises(UnsupportedError, match="dispatch_batches=True sends batches between processes"):
        run_ranks(rank, 2, 1)
