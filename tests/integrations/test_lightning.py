"""Lightning's Trainer with another strategy learns what it learns with its own."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.models import VOCAB, Net, relative_difference, same_bits, seeded, tight, token_loss
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    Callback,
    EarlyStopping,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    StochasticWeightAveraging,
    Timer,
)
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, SequentialLR, StepLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchmetrics import MeanMetric

import rayzero
from rayzero import ZeroConfig
from rayzero.engine.context import RankContext, running_in
from rayzero.errors import UnsupportedError
from rayzero.integrations.lightning import ZeroStrategy
from rayzero.testing import run_ranks

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{text}")
    for text in (
        r"`isinstance\(treespec, LeafSpec\)` is deprecated",  # Lightning with torch 2.13
        "The '.*_dataloader' does not have many workers",
        "You defined a `validation_step` but have no `val_dataloader`",
        "Checkpoint directory .* exists and is not empty",
    )
]


class Learner(LightningModule):
    """A net that the steps call without going through forward; the rates of every batch are kept."""

    manual = False
    plateau = False

    def __init__(self) -> None:
        super().__init__()
        self.net = seeded(Net)
        self.mean = MeanMetric()
        self.lrs: list[tuple[float, ...]] = []  # of the groups
        self.automatic_optimization = not self.manual

    def training_step(self, batch: Any, index: int) -> Any:
        loss = token_loss(self.net, batch)
        self.log("train", loss, on_step=False, on_epoch=True)
        if not self.manual:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.01, gradient_clip_algorithm="value")
        optimizer.step()
        self.lr_schedulers().step()
        return None

    def on_train_batch_end(self, *_: Any) -> None:
        self.lrs.append(tuple(group["lr"] for group in self.optimizers().param_groups))

    def validation_step(self, batch: Any, index: int) -> None:
        loss = token_loss(self.net, batch)
        self.log("val", loss, sync_dist=True)
        self.mean(loss)
        self.log("mean", self.mean)

    def predict_step(self, batch: Any, index: int) -> Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)
        if self.plateau:
            scheduler = ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
            return {"optimizer": optimizer, "lr_scheduler": scheduler, "monitor": "val"}
        parts = [StepLR(optimizer, 2, gamma) for gamma in (0.5, 0.9)]
        return [optimizer], [{"scheduler": SequentialLR(optimizer, parts, [5]), "interval": "step"}]


class ManualLearner(Learner):
    manual = True


class PlateauLearner(Learner):
    plateau = True


def examples() -> TensorDataset:
    """24 of 8 tokens and 8 targets."""
    both = torch.randint(0, VOCAB, (2, 24, 8), generator=torch.Generator().manual_seed(0))
    return TensorDataset(both[0], both[1])


def loader(batch_size: int = 4, **settings: Any) -> DataLoader[Any]:
    return DataLoader(examples(), batch_size=batch_size, **settings)


def trainer(**settings: Any) -> Trainer:
    quiet = {f"enable_{name}": False for name in ("progress_bar", "model_summary", "checkpointing")}
    return Trainer(**{"accelerator": "cpu", "devices": 1, "max_epochs": 2, "logger": False} | quiet | settings)


def zero(**settings: Any) -> ZeroStrategy:
    """Units come and go."""
    return ZeroStrategy(tight(Net(), prefetch_buffer_size=1, spare=0, **settings))


def metrics_of(trained: Trainer) -> dict[str, float]:
    return {name: float(value) for name, value in trained.callback_metrics.items()}


def state_of(module: nn.Module) -> dict[str, Tensor]:
    return rayzero.full_state_dict(module)


CASES: dict[str, tuple[type[Learner], dict[str, Any]]] = {
    "neither clipped nor accumulated": (Learner, {}),
    "norm clipped": (Learner, {"gradient_clip_val": 0.5}),
    "values clipped": (Learner, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "accumulated, with a remainder, validated between": (
        Learner,
        {"accumulate_grad_batches": 4, "val_check_interval": 3},
    ),
    "a plateau of the validation loss": (PlateauLearner, {"val_check_interval": 3, "max_epochs": 3}),
    "manual optimization, values clipped": (ManualLearner, {}),
}


@pytest.mark.spread(4)
@pytest.mark.parametrize("case", CASES)
def test_trains_as_lightning_alone(case: str, alone: RankContext) -> None:
    """The same bits, but where a norm is clipped (its scale is computed in fp64 here)."""
    kind, settings = CASES[case]
    plain, ours, done = kind(), kind(), {}
    for module, strategy in ((plain, "auto"), (ours, zero())):
        done[module] = trainer(strategy=strategy, **settings)
        done[module].fit(module, loader(), loader(6))
    exact = case != "norm clipped"
    assert same_bits(state_of(ours), plain.state_dict()) or not exact
    assert relative_difference(state_of(ours), plain.state_dict()) <= 1e-5
    assert ours.lrs == plain.lrs
    assert len(set(plain.lrs)) > 1
    want, got = (metrics_of(done[module]) for module in (plain, ours))
    assert set(got) == {"train", "val", "mean"}
    assert got == pytest.approx(want, rel=0 if exact else 1e-5)
    for results in zip(*(done[module].predict(module, loader()) for module in (plain, ours)), strict=True):
        torch.testing.assert_close(*results, rtol=0, atol=0 if exact else 1e-4)
    assert done[ours].validate(ours, loader(6), verbose=False) == [
        pytest.approx(row) for row in done[plain].validate(plain, loader(6), verbose=False)
    ]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_accumulation_may_change_between_epochs(precision: str, alone: RankContext) -> None:
    """Sums of several gradients are kept in fp32 where a step has several in any epoch."""
    plain, ours = Learner(), Learner()
    for module, strategy in ((plain, "auto"), (ours, zero(precision=precision))):
        schedule = GradientAccumulationScheduler({1: 3, 2: 2})
        trainer(strategy=strategy, max_epochs=3, callbacks=[schedule]).fit(module, loader())
    assert ours.lrs == plain.lrs
    if precision == "fp32":
        assert same_bits(state_of(ours), plain.state_dict())
    else:
        assert relative_difference(state_of(ours), plain.state_dict()) < 0.1


class Finetuned(Learner):
    """A part is frozen by a callback until an epoch begins, another one for good."""

    def __init__(self) -> None:
        super().__init__()
        self.net.norm.requires_grad_(False)

    @property
    def backbone(self) -> nn.Module:
        return self.net.layers

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-3, fused=True)


class LateLayers(BaseFinetuning):
    """Trains the layers from the second epoch on."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.backbone)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.backbone, optimizer, lr=5e-4)


def test_a_callback_may_unfreeze_what_it_froze(alone: RankContext, tmp_path: Path) -> None:
    """Also in a later fit(), from a checkpoint before or after it."""
    for begun in (None, 1, 2):
        states = []
        for strategy in ("auto", zero()):
            path = None
            if begun is not None:
                path = tmp_path / f"{begun}-{len(states)}.ckpt"
                with running_in(RankContext()):
                    first = trainer(strategy=zero() if states else "auto", max_epochs=begun, callbacks=[LateLayers()])
                    first.fit(Finetuned(), loader())
                    first.save_checkpoint(path)
            module = Finetuned()
            with running_in(RankContext()):
                trainer(strategy=strategy, max_epochs=3, callbacks=[LateLayers()]).fit(module, loader(), ckpt_path=path)
                assert not any(p.requires_grad for p in module.net.norm.parameters())
                states.append(state_of(module) if states else module.state_dict())
        assert same_bits(states[1], states[0]), begun


def test_a_step_that_leaves_forward_out_gets_inputs_of_the_precision(alone: RankContext) -> None:
    class Float(Learner):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(4, 4)

        def training_step(self, batch: Any, index: int) -> Tensor:
            assert batch[0].dtype is torch.bfloat16
            return self.net(batch[0]).square().mean()

    module = Float()
    before = module.net.weight.detach().clone()
    strategy = ZeroStrategy(ZeroConfig(precision="bf16"))
    trainer(strategy=strategy, max_steps=1).fit(module, DataLoader(TensorDataset(torch.ones(2, 4))))
    after = state_of(module)["net.weight"]
    assert after.dtype is torch.float32
    assert not torch.equal(after, before)


# ---- checkpoints ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["ours", "plain"])
@pytest.mark.parametrize("second", ["ours", "plain"])
def test_either_goes_on_from_the_others_checkpoint(first: str, second: str, tmp_path: Path) -> None:
    whole = Learner()
    trainer(max_epochs=3).fit(whole, loader(), loader(6))
    for kind, epochs, path in ((first, 2, None), (second, 3, tmp_path / "last.ckpt")):
        with running_in(RankContext()):
            saved = ModelCheckpoint(tmp_path, filename="last", save_top_k=1)
            strategy = zero() if kind == "ours" else "auto"
            module = Learner()
            trained = trainer(strategy=strategy, max_epochs=epochs, callbacks=[saved], enable_checkpointing=True)
            trained.fit(module, loader(), loader(6), ckpt_path=path)
            state = state_of(module) if kind == "ours" else module.state_dict()
    assert same_bits(state, whole.state_dict())
    assert module.lrs == whole.lrs[12:]


def test_a_checkpoint_has_what_lightnings_has(alone: RankContext, tmp_path: Path) -> None:
    files = {}
    for name, strategy in (("plain", "auto"), ("ours", zero())):
        trained = trainer(strategy=strategy)
        trained.fit(Learner(), loader())
        trained.save_checkpoint(tmp_path / name)
        files[name] = torch.load(tmp_path / name, weights_only=True)
    plain, ours = files["plain"], files["ours"]
    assert set(ours) == set(plain)
    assert same_bits(ours["state_dict"], plain["state_dict"])
    (got,), (want,) = ours["optimizer_states"], plain["optimizer_states"]
    assert got["param_groups"] == want["param_groups"]
    assert all(same_bits(got["state"][key], want["state"][key]) for key in want["state"])
    assert ours["lr_schedulers"] == plain["lr_schedulers"]


# ---- several ranks ----------------------------------------------------------------------------------------------


class _Seen(Callback):
    """The first token of every training example, in order, and how often validation ran."""

    def __init__(self) -> None:
        self.tokens: list[list[int]] = []
        self.validations = 0

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        self.tokens.append(batch[0][:, 0].tolist())

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self.validations += 1


class Distributed(Learner):
    """SGD sees the size of gradients, which Adam does not."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def fitted(directory: Path, batch_size: int, **settings: Any) -> tuple[Distributed, Trainer, _Seen]:
    """Until validation gets no better by 10, after the second epoch; one checkpoint at the end."""
    module, seen = Distributed(), _Seen()
    callbacks = [seen, EarlyStopping("val", min_delta=10.0, patience=1), ModelCheckpoint(directory, filename="end")]
    common = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2, "max_epochs": 9, "num_sanity_val_steps": 0}
    trained = trainer(callbacks=callbacks, enable_checkpointing=True, **common, **settings)
    sampler = DistributedSampler(examples(), 1, 0) if "strategy" not in settings else None
    trained.fit(module, loader(batch_size, sampler=sampler), loader(6))
    return module, trained, seen


def fit_a_rank(context: RankContext) -> tuple[dict[str, Tensor], float, list[Tensor], list[list[int]], int]:
    assert context.run_dir is not None
    module, trained, seen = fitted(context.run_dir, 2, strategy=zero())
    loss = metrics_of(trained)["val"]
    with pytest.raises(UnsupportedError, match=r"ckpt_path after fit\(\) on several ranks"):
        trained.validate(module, loader(6), ckpt_path="best")
    return state_of(module), loss, trained.predict(module, loader()), seen.tokens, seen.validations


@pytest.mark.usefixtures("forked_with_trainers")
@pytest.mark.thorough
def test_two_ranks_learn_what_one_learns_from_batches_of_twice_the_size(tmp_path: Path) -> None:
    """Lightning shuffles what it splits: so does the one, by the same sampler."""
    plain, trained, whole = fitted(tmp_path / "plain", 4)
    ranks = run_ranks(fit_a_rank, 2, 2, "grpc", processes=True, run_dir=tmp_path)
    (one, _, predicted, tokens, _), (other, _, same, others_tokens, _) = ranks
    assert same_bits(one, other)
    assert relative_difference(one, plain.state_dict()) <= 1e-5
    for _, loss, _, _, validations in ranks:
        assert loss == pytest.approx(metrics_of(trained)["val"], rel=1e-5)
        assert validations == whole.validations == 2
    both = [sorted(a + b) for a, b in zip(tokens, others_tokens, strict=True)]
    assert both == [sorted(batch) for batch in whole.tokens]
    assert all(torch.equal(a, b) for a, b in zip(predicted, same, strict=True))
    assert sum(len(batch) for batch in predicted) == 24
    assert same_bits(torch.load(tmp_path / "end.ckpt", weights_only=True)["state_dict"], one)


def test_two_ranks_in_one_process_are_refused() -> None:
    before = rank_zero_only.rank
    with running_in(RankContext(world_size=2)):
        trainer(strategy=ZeroStrategy())
        with (
            running_in(RankContext(rank=1, world_size=2)),
            pytest.raises(UnsupportedError, match=r"rank 0 uses Lightning in this process already.*processes=True"),
        ):
            trainer(strategy=ZeroStrategy())
    rank_zero_only.rank = before


class SyncedInTraining(Learner):
    def on_train_batch_start(self, *_: Any) -> None:
        self.log("count", 1.0, sync_dist=True, on_epoch=True)


class Gathers(Learner):
    def on_train_start(self) -> None:
        self.all_gather(torch.ones(1))


class Prepares(Learner):
    def prepare_data(self) -> None:
        """Downloads something."""


@pytest.mark.parametrize(
    ("module", "settings", "message"),
    [
        (SyncedInTraining, {"limit_train_batches": 1}, "sync_dist=True in training"),
        (Gathers, {}, r"all_gather\(\)"),
        (Prepares, {}, r"prepare_data\(\) on one of several ranks"),
        (Learner, {"callbacks": [Timer(timedelta(days=1))]}, r"broadcast of False \(Timer"),
    ],
)
def test_what_needs_other_ranks_is_refused(module: type, settings: Any, message: str) -> None:
    def rank(context: RankContext) -> None:
        if context.rank == 0:
            trainer(strategy=ZeroStrategy(), **settings).fit(module(), loader())

    with pytest.raises(UnsupportedError, match=f"Lightning's {message}"):
        run_ranks(rank, 2, 1)


# ---- refused ----------------------------------------------------------------------------------------------------


@pytest.mark.promise("refused", "integrations")
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        pytest.param(
            {"precision": "16-mixed"},
            r"precision='.*-mixed' is not supported on RayZero: set ZeroConfig",
            marks=pytest.mark.filterwarnings("ignore:You passed `Trainer.accelerator='cpu', precision='16-mixed'"),
        ),
        ({"precision": "bf16-mixed"}, r"precision='bf16-mixed' .* ZeroConfig\(precision='bf16'\)"),
        ({"precision": "bf16-true"}, r"precision='bf16-true' .* ZeroConfig\(precision='bf16'\)"),
        ({"precision": "64-true"}, r"precision='64-true'"),
        ({"devices": 2}, r"devices=\[.*\], num_nodes=1 .*a rank has one"),
        ({"num_nodes": 2}, r"devices=\[.*\], num_nodes=2 .*a rank has one"),
        ({"sync_batchnorm": True}, "sync_batchnorm=True"),
    ],
)
def test_a_setting_that_cannot_be_right_is_refused(settings: Any, message: str, alone: RankContext) -> None:
    with pytest.raises(UnsupportedError, match=f"Lightning's {message}"):
        trainer(strategy=ZeroStrategy(), **settings)


class Two(Learner):
    """Muon and AdamW, each with a scheduler, in one of the forms that Lightning takes."""

    def configure_optimizers(self) -> Any:
        matrices = [param for param in self.net.layers.parameters() if param.dim() == 2]
        known = set(map(id, matrices))
        others = [param for param in self.net.parameters() if id(param) not in known]
        both = torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(others)
        schedulers = StepLR(both[0], 2, 0.5), StepLR(both[1], 2, 0.9)
        steps = [{"scheduler": each, "interval": "step"} for each in schedulers]
        if self.manual:
            return list(both), steps
        return [{"optimizer": each, "lr_scheduler": step} for each, step in zip(both, steps, strict=True)]


class TwoByHand(Two):
    manual = True

    def training_step(self, batch: Any, index: int) -> None:
        loss = token_loss(self.net, batch)
        self.log("train", loss, on_step=False, on_epoch=True)
        self.manual_backward(loss)
        for optimizer, scheduler in zip(self.optimizers(), self.lr_schedulers(), strict=True):
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()

    def on_train_batch_end(self, *_: Any) -> None:
        self.lrs.append(tuple(group["lr"] for each in self.optimizers() for group in each.param_groups))


def test_two_optimizers_are_one_and_train_as_by_hand(alone: RankContext, tmp_path: Path) -> None:
    plain, ours = TwoByHand(), Two()
    trainer().fit(plain, loader())
    trained = trainer(strategy=zero())
    trained.fit(ours, loader())
    assert same_bits(state_of(ours), plain.state_dict())
    assert ours.lrs == plain.lrs
    trained.save_checkpoint(tmp_path / "two.ckpt")
    (saved,) = torch.load(tmp_path / "two.ckpt", weights_only=False)["optimizer_states"]
    assert {group["optimizer"] for group in saved["param_groups"]} == {"torch.optim:Muon", "torch.optim.adamw:AdamW"}
    with running_in(RankContext()):
        again = Two()
        trainer(strategy=zero(), max_epochs=3).fit(again, loader(), ckpt_path=tmp_path / "two.ckpt")
        found = state_of(again)
    longer = TwoByHand()
    trainer(max_epochs=3).fit(longer, loader())
    assert same_bits(found, longer.state_dict())


class No(Learner):
    def configure_optimizers(self) -> None:
        return None


@pytest.mark.filterwarnings("ignore:`LightningModule.configure_optimizers` returned `None`")
def test_no_optimizer_is_refused(alone: RankContext) -> None:
    with pytest.raises(UnsupportedError, match=r"configure_optimizers\(\) without an optimizer"):
        trainer(strategy=ZeroStrategy()).fit(No(), loader())


def test_callbacks_that_write_weights_are_refused(alone: RankContext) -> None:
    averaging = StochasticWeightAveraging(1e-3, device=None)
    with pytest.raises(UnsupportedError, match="callbacks that write weights, StochasticWeightAveraging, is"):
        trainer(strategy=ZeroStrategy(), callbacks=[averaging]).fit(Learner(), loader())


def test_a_second_fit_is_refused(alone: RankContext) -> None:
    module, trained = Learner(), trainer(strategy=ZeroStrategy(), max_epochs=1)
    trained.fit(module, loader())
    with pytest.raises(UnsupportedError, match=r"second fit\(\) of a module.*ckpt_path"):
        trained.fit(module, loader())
