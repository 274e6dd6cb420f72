"""``rayzero.track`` and ``context.step``: a loop that resumes with them goes on as if it had not stopped."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rayzero
from rayzero import ZeroConfig
from rayzero.checkpoint.state_values import from_bytes, to_bytes
from rayzero.engine.context import RankContext, get_context, running_in
from rayzero.engine.loop.tracked import LoopReport, RecentReports, plain_metrics
from rayzero.engine.optimizer.zero_optimizer import ZeroOptimizer
from rayzero.errors import CheckpointError, ConfigError, UnsupportedError
from rayzero.testing import run_ranks

from .models import Batches, Net, fit, prepared_copy, same_bits, seeded

STEPS = 7


class Kept:
    """An object of the user's own, with a tensor."""

    def __init__(self) -> None:
        self.losses = torch.zeros(0)

    def state_dict(self) -> dict[str, Tensor]:
        return {"losses": self.losses}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.losses = state["losses"]


def loop(folder: Path, resume: Path | None, stop: int, model: nn.Module | None = None) -> Any:
    """A plain loop, the same for a fresh start and a resume; its losses, rates and weights."""
    context = get_context()
    model = copy.deepcopy(model) if model is not None else seeded(Net)
    model, optimizer = rayzero.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), resume=resume)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=STEPS + 1)
    loader, kept = Batches(context.rank), Kept()
    rayzero.track(scheduler=scheduler, loader=loader, kept=kept)
    batches = iter(loader)
    for step in range(context.step, stop):
        assert context.step == step
        x, y = next(batches)
        loss = F.cross_entropy(F.dropout(model(x), 0.1).flatten(0, 1), y.flatten())
        loss.backward()
        optimizer.clip_grad_norm_(0.5)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        kept.losses = torch.cat([kept.losses, loss.detach().view(1)])
        rayzero.save_checkpoint(optimizer, folder / f"step-{step + 1}")
    return kept.losses, scheduler.get_last_lr(), rayzero.full_state_dict(model)


def test_a_loop_resumed_with_track_equals_one_that_never_stopped_at_every_step(tmp_path: Path) -> None:
    with running_in(RankContext()):
        losses, rates, weights = loop(tmp_path, None, STEPS)
    for at in range(1, STEPS):
        with running_in(RankContext()):
            again = loop(tmp_path / "again", tmp_path / f"step-{at}", STEPS)
        assert torch.equal(again[0], losses), at
        assert again[1] == rates
        assert same_bits(again[2], weights)


def test_each_rank_gets_its_own_states_and_a_new_rank_those_of_rank_0(tmp_path: Path) -> None:
    base = seeded(Net)

    def start(context: RankContext) -> Batches:
        _, optimizer = prepared_copy(base, torch.optim.AdamW)
        loader = Batches(context.rank)
        loader.at = 10 * (context.rank + 1)
        rayzero.track(loader=loader)
        if context.resume is None:
            rayzero.save_checkpoint(optimizer, tmp_path / "step-0", {"rank": context.rank})
        else:
            assert context.loop_state == {"rank": context.rank % 2}
        return loader

    run_ranks(start, 2, 1)
    found = run_ranks(start, 3, 2, resume=tmp_path / "step-0")
    assert [loader.at for loader in found] == [10, 20, 10]


def one() -> tuple[nn.Module, ZeroOptimizer]:
    """A prepared model and its optimizer."""
    return rayzero.prepare(model := nn.Linear(4, 4), torch.optim.SGD(model.parameters(), lr=0.1))


def saved(folder: Path, **tracked: Any) -> Path:
    """The checkpoint that a run which tracks these objects saves before its first step."""
    with running_in(RankContext()):
        _, optimizer = one()
        rayzero.track(**tracked)
        rayzero.save_checkpoint(optimizer, folder / "ck")
    return folder / "ck"


def test_track_before_prepare_is_refused() -> None:
    with running_in(RankContext()) as context:
        assert context.step == 0
        with pytest.raises(UnsupportedError, match=r"track\(\) was called before rayzero.prepare\(\)"):
            rayzero.track(loader=Batches())


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        (7, r"track\(it=...\) takes an object with state_dict\(\) and load_state_dict\(\), got a int$"),
        (None, "got a NoneType$"),
        (Net, "got a type$"),
        ({"state_dict": 1}, "got a dict$"),
    ],
)
def test_what_cannot_be_tracked_is_refused_before_anything_is_loaded(bad: Any, named: str, tmp_path: Path) -> None:
    class Loads(Batches):
        def load_state_dict(self, state: dict[str, int]) -> None:
            raise AssertionError("not before all are checked")

    with running_in(RankContext(resume=saved(tmp_path, first=Batches()))) as context:
        one()
        with pytest.raises(ConfigError, match=named) as caught:
            rayzero.track(first=Loads(), it=bad)
        assert "\n" not in str(caught.value)
        assert context.tracked is not None
        assert context.tracked.states() == {}


def test_the_prepared_model_and_its_optimizer_are_refused() -> None:
    with running_in(RankContext()):
        model, optimizer = one()
        for mine, kind in ((model, "Linear"), (optimizer, "ZeroOptimizer")):
            with pytest.raises(ConfigError, match=rf"track\(mine=...\) was given a prepared {kind}, whose state is"):
                rayzero.track(mine=mine)


def test_a_name_belongs_to_one_object() -> None:
    with running_in(RankContext()) as context:
        one()
        loader = Batches()
        rayzero.track(loader=loader)
        rayzero.track(loader=loader)
        with pytest.raises(ConfigError, match="already tracks another object as 'loader'; choose another name"):
            rayzero.track(loader=Batches())
        assert context.tracked is not None
        assert context.tracked.states() == {"loader": {"at": 0}}


def test_the_same_object_is_loaded_once(tmp_path: Path) -> None:
    with running_in(RankContext(resume=saved(tmp_path, loader=Batches()))):
        one()
        loader = Batches()
        rayzero.track(loader=loader)
        loader.at = 5
        rayzero.track(loader=loader)
        assert loader.at == 5


def test_a_name_that_the_checkpoint_lacks_starts_afresh_and_says_so(tmp_path: Path, caplog: Any) -> None:
    with running_in(RankContext(resume=saved(tmp_path, batches=Batches()))), caplog.at_level(logging.WARNING):
        one()
        loader = Batches()
        loader.at = 3
        rayzero.track(loader=loader)
    assert loader.at == 3
    assert f"{tmp_path / 'ck'} has no state of 'loader' (it has 'batches'): the object starts afresh" in caplog.text


def test_what_an_objects_load_raises_names_it(tmp_path: Path) -> None:
    class Picky(Batches):
        def load_state_dict(self, state: dict[str, int]) -> None:
            raise KeyError("size")

    with running_in(RankContext(resume=saved(tmp_path, loader=Batches()))):
        one()
        with pytest.raises(KeyError) as caught:
            rayzero.track(loader=Picky())
        assert caught.value.__notes__ == [f"while rayzero.track(loader=...) loaded its state from {tmp_path / 'ck'}"]


def test_a_state_that_a_checkpoint_cannot_hold_is_named(tmp_path: Path) -> None:
    class Odd(Batches):
        whole = False

        def state_dict(self) -> dict[str, Any]:
            return {"source": 1 if self.whole else object()}

    with running_in(RankContext()):
        _, optimizer = one()
        odd = Odd()
        with pytest.raises(CheckpointError, match=r"tracked\.odd\.source is a builtins\.object, which a checkpoint"):
            rayzero.track(odd=odd)
        odd.whole = True
        rayzero.track(odd=odd)
        odd.whole = False
        with pytest.raises(CheckpointError, match=r"tracked\.odd\.source is a builtins\.object, which a checkpoint"):
            rayzero.save_checkpoint(optimizer, tmp_path / "ck")
    assert not list(tmp_path.iterdir())


def test_in_a_run_the_steps_and_objects_are_those_of_the_first_model(tmp_path: Path) -> None:
    def train(context: RankContext) -> Any:
        pairs = [
            rayzero.prepare(model := seeded(Net, number), torch.optim.AdamW(model.parameters())) for number in (0, 1)
        ]
        loader = Batches()
        rayzero.track(loader=loader)
        begun = context.step, loader.at
        for model, optimizer in [*pairs, pairs[0]]:
            fit(model, optimizer, [0])
        loader.at += 4
        if context.resume is None:
            for _, optimizer in pairs:
                rayzero.save_checkpoint(optimizer, tmp_path / "ck")
        return begun, context.step

    assert run_ranks(train, 1, 1) == [((0, 0), 2)]
    assert run_ranks(train, 1, 1, resume=tmp_path / "ck") == [((2, 4), 4)]


def test_in_a_script_the_steps_and_objects_are_those_of_the_last_model() -> None:
    """A notebook's cell runs again."""
    with running_in(RankContext()) as context:
        for _ in range(2):
            model, optimizer = rayzero.prepare(
                model := nn.Linear(4, 4), torch.optim.SGD(model.parameters(), lr=0.1), ZeroConfig()
            )
            rayzero.track(loader=Batches())
            assert context.step == 0
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            assert context.step == 1


# ---- with each commit


def test_loop_states_come_back_as_they_were() -> None:
    state = {"a": [1, 2.5, None], "b": {3: (torch.arange(4, dtype=torch.int16), "x")}, "c": torch.zeros(0, 3)}
    back = from_bytes(to_bytes(state))
    assert back["a"] == state["a"]
    tensor, text = back["b"][3]
    assert (text, tensor.dtype, tensor.tolist()) == ("x", torch.int16, [0, 1, 2, 3])
    assert back["c"].shape == (0, 3)
    for cut in (0, 7, 20, len(to_bytes(state)) - 1):
        with pytest.raises(CheckpointError, match=r"a loop's state of .* is damaged"):
            from_bytes(to_bytes(state)[:cut])


# ---- reports are numbered and kept, so that a loop's next life can make them again


def test_reports_are_numbered_within_a_step_and_those_of_two_steps_are_kept() -> None:
    recent = RecentReports()
    recent.arrived(9, 0)
    made = [recent.add(step, {"loss": float(step)}, None) for step in (3, 4, 4, 5)]
    assert [(each.step, each.number) for each in made] == [(3, 0), (4, 0), (4, 1), (5, 0)]
    again = RecentReports()
    again.skip(7)
    assert again.restore(recent.state()) == made[1:]
    again.skip(5)
    assert again.add(5, {"loss": 9.0}, "a") == LoopReport(step=5, number=2, metrics={"loss": 9.0}, checkpoint="a")


def test_reports_that_have_not_arrived_are_kept() -> None:
    recent = RecentReports()
    for step in range(300):
        recent.add(step, {}, None)
    assert [each["step"] for each in recent.state()["recent"]] == list(range(200, 300)), "of a receiver that is dead"
    recent.arrived(297, 0)
    recent.add(300, {}, None)
    assert [each["step"] for each in recent.state()["recent"]] == [298, 299, 300]


def test_a_report_that_is_refused_takes_no_number() -> None:
    recent = RecentReports()
    with pytest.raises(ConfigError, match="'logits' is a Tensor"):
        recent.add(1, {"logits": torch.zeros(3)}, None)
    with pytest.raises(ConfigError, match=r"report takes a mapping from names to values, got 2\.5"):
        recent.add(1, 2.5, None)  # type: ignore[arg-type]
    assert recent.add(1, {}, None).number == 0


def test_one_element_tensors_and_arrays_become_numbers():
    metrics = {"loss": torch.tensor(1.5), "n": np.int64(3), "x": np.array([2.0]), "note": "ok", "none": None}
    assert plain_metrics(metrics) == {"loss": 1.5, "n": 3, "x": 2.0, "note": "ok", "none": None}
