"""What a loop does between prepare() and its first forward, and before step(), counts once, also if it is repeated."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rayzero
from rayzero import ZeroConfig
from rayzero.engine.context import RankContext
from rayzero.engine.loop import keeper
from rayzero.engine.loop.tracked import LoopReport
from rayzero.engine.optimizer.zero_optimizer import ZeroOptimizer
from rayzero.errors import StateLostError
from rayzero.testing import Killed, run_ranks

from .models import VOCAB, Batches, Block, same_bits

pytestmark = pytest.mark.usefixtures("one_torch_thread")

STEPS = 5
Point = tuple[str, int]  # where in the loop, in which step
OPEN, DECIDED = ("backward", 2), ("stepped", 2)  # with step 2 open, and decided


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 64)
        self.layers = nn.ModuleList(Block(64) for _ in range(2))
        self.extra = nn.Linear(64, 64)
        self.head = nn.Linear(64, VOCAB)
        self.uses_extra, self.counts = True, False
        self.register_buffer("forwards", torch.zeros(1), persistent=False)
        self.forwards: Tensor

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        if self.uses_extra:
            x = x + self.extra(x)
        if self.counts:
            self.forwards.add_(torch.is_grad_enabled())
        return self.head(x) * (1 + 0.1 * self.forwards)


@functools.cache
def base() -> Small:
    torch.manual_seed(3)
    return Small()


@dataclass
class Loop:
    """What a life of a rank has, for the parts of a loop that tests give."""

    model: Small
    optimizer: ZeroOptimizer
    batches: Iterator[tuple[Tensor, Tensor]]
    context: RankContext
    step: int = 0
    loss: float = 0.0
    shift: int = 0  # of the tokens
    tracked: dict[str, Any] = field(default_factory=dict)


Part = Callable[[Loop], None]


def nothing(loop: Loop) -> None: ...


def train(
    context: RankContext,
    at: tuple[Point, ...],
    reports: list[LoopReport],
    begin: Part = nothing,
    top: Part = nothing,
    before_step: Part = nothing,
    end: Part = nothing,
    grouped: tuple[str, ...] = ("",),
    frozen: tuple[str, ...] = (),
    set_to_none: bool = True,
) -> Any:
    """A loop in which rank 0 dies ``at`` some points. ``grouped``: beginnings of the names of what the optimizer
    trains."""
    torch.set_num_threads(1)
    armed = context.rank == 0 and context.life < len(at)

    def fault(point: str, step: int) -> None:
        if armed and at[context.life] == (point, step):
            raise Killed

    context.sink = reports.append if context.rank == 0 else None
    model = copy.deepcopy(base())
    for name, param in model.named_parameters():
        param.requires_grad_(not name.startswith(frozen) if frozen else True)
    trained = [param for name, param in model.named_parameters() if name.startswith(grouped)]
    adamw = torch.optim.AdamW(trained, lr=1e-2)
    model, optimizer = rayzero.prepare(model, adamw, ZeroConfig(units=["Block", "Embedding"]))
    loader = Batches(context.rank)
    loop = Loop(model, optimizer, iter(()), context)
    begin(loop)
    rayzero.track(loader=loader, **loop.tracked)
    loop.batches = iter(loader)
    for step in range(context.step, STEPS):
        loop.step = step
        top(loop)
        x, y = next(loop.batches)
        x = (x + loop.shift) % VOCAB
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loop.loss = float(loss.detach())
        loss.backward()
        fault("backward", step)
        before_step(loop)
        optimizer.step()
        optimizer.last_decision().result()
        fault("stepped", step)
        end(loop)
        optimizer.zero_grad(set_to_none)
    return context.life, rayzero.full_state_dict(model), optimizer.state_dict()


def run(*at: Point, world_size: int = 1, transport: str = "inproc", **parts: Any) -> tuple[Any, list[LoopReport]]:
    """The ranks' results, and the reports of rank 0."""
    reports: list[LoopReport] = []
    one = functools.partial(train, at=at, reports=reports, **parts)
    found = run_ranks(one, world_size, 2, transport, stall_timeout=20.0, max_failures=len(at))  # type: ignore[arg-type]
    assert [life for life, *_ in found] == [len(at), 0][:world_size]
    return [rest for _, *rest in found], reports


def require_same(ours: Any, theirs: Any) -> None:
    for (weights, states), (others, their_states) in zip(ours, theirs, strict=True):
        assert same_bits(weights, others)
        assert states["param_groups"] == their_states["param_groups"]
        for key, state in states["state"].items():
            assert same_bits(state, their_states["state"][key])


def fill(loop: Loop) -> None:
    with torch.no_grad():
        loop.model.head.bias.fill_(0.25)


def halve(loop: Loop) -> None:
    with torch.no_grad():
        loop.model.embed.weight.mul_(0.5)


def load(loop: Loop) -> None:
    halved = {name: value * 0.5 for name, value in base().state_dict().items()}
    loop.model.load_state_dict(halved)


def load_moments(loop: Loop) -> None:
    model = copy.deepcopy(base())
    plain = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    plain.step()
    loop.optimizer.load_state_dict(plain.state_dict())


def add_group(loop: Loop) -> None:
    loop.optimizer.add_param_group({"params": list(loop.model.extra.parameters()), "lr": 5e-3})
    schedule(loop)


def schedule(loop: Loop) -> None:
    loop.tracked["scheduler"] = torch.optim.lr_scheduler.ExponentialLR(loop.optimizer, 0.7)


def decay(loop: Loop) -> None:
    loop.tracked["scheduler"].step()


def lower_by_loss(loop: Loop) -> None:
    for group in loop.optimizer.param_groups:
        group["lr"] *= 0.9 + 0.01 * loop.loss


def lower(loop: Loop) -> None:
    for group in loop.optimizer.param_groups:
        group["lr"] *= 0.9


def alternate(loop: Loop) -> None:
    """Where it is not used, a layer has the zero gradient of the step before."""
    loop.model.uses_extra = loop.step % 2 == 1


def draw(loop: Loop) -> None:
    loop.shift = int(torch.randint(VOCAB, (1,)))


def try_out(loop: Loop) -> None:
    """A forward and a backward to see whether there is memory for them."""
    loop.model.counts = True
    loop.model(torch.zeros(1, 8, dtype=torch.long)).sum().backward()
    loop.optimizer.zero_grad()


def freeze(loop: Loop) -> None:
    """Two of the steps train fewer parameters."""
    if loop.step in (1, 3):
        loop.model.layers[0].requires_grad_(loop.step == 3)


def counted(loop: Loop) -> None:
    """A buffer counts forwards, and is no part of a checkpoint."""
    loop.model.counts = True


PARTS: dict[str, dict[str, Any]] = {
    "written after prepare()": {"begin": fill},
    "loaded after prepare()": {"begin": load},
    "moments loaded after prepare()": {"begin": load_moments},
    "group added after prepare()": {"begin": add_group, "end": decay, "grouped": ("embed", "layers", "head")},
    "tried out before track()": {"begin": try_out, "top": halve},
    "frozen by an earlier iteration": {"top": freeze},
    "counted in the forward": {"begin": counted},
    "written before the forward": {"top": halve},
    "scheduled before the forward": {"begin": schedule, "top": decay},
    "rate lowered before the forward": {"top": lower},
    "rate lowered before step()": {"before_step": lower},
    "gradients zeroed by the iteration before": {"top": alternate, "set_to_none": False},
}


@functools.cache
def undisturbed(what: str, world_size: int) -> Any:
    return run(world_size=world_size, **PARTS[what])[0]


@pytest.mark.promise("recoverable")
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # a new life begins with it
@pytest.mark.parametrize(
    "deaths",
    [
        (OPEN, ("stepped", 3)),
        pytest.param((DECIDED, ("backward", 3)), marks=pytest.mark.thorough),
    ],
    ids=["open, then decided", "decided, then open"],
)
@pytest.mark.spread(6)
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("what", PARTS)
def test_what_a_loop_does_before_its_forward_is_done_once(
    what: str, world_size: int, deaths: tuple[Point, ...]
) -> None:
    require_same(run(*deaths, world_size=world_size, **PARTS[what])[0], undisturbed(what, world_size))


@pytest.mark.parametrize("at", [OPEN, DECIDED])
def test_numbers_that_are_drawn_between_prepare_and_track_change_no_batch(at: Point) -> None:
    parts: dict[str, Any] = {"begin": draw, "top": draw}
    torch.manual_seed(1)
    plain, _ = run(**parts)
    torch.manual_seed(1)
    require_same(run(at, **parts)[0], plain)


def test_options_that_depend_on_a_loss_are_those_with_which_the_step_was_decided() -> None:
    """The loss is another one in a repeat of an iteration that is decided."""
    plain, _ = run(before_step=lower_by_loss)
    for step in (0, 2):
        require_same(run(("stepped", step), before_step=lower_by_loss)[0], plain)


@pytest.mark.parametrize("at", [("backward", 0), ("stepped", 0)])
def test_a_group_may_be_added_before_the_first_step(at: Point) -> None:
    parts = PARTS["group added after prepare()"]
    require_same(run(at, **parts)[0], run(**parts)[0])


@pytest.mark.parametrize("at", [("backward", 3), ("stepped", 3)])
def test_a_group_that_an_earlier_iteration_has_added_is_refused_by_name(at: Point) -> None:
    def top(loop: Loop) -> None:
        if loop.step == 1:
            add_group(loop)

    with pytest.raises(StateLostError, match="the optimizer had 2 parameter groups, and now it has 1"):
        run(at, top=top, grouped=("embed", "layers", "head"))


def test_a_report_before_the_forward_is_made_once() -> None:
    def top(loop: Loop) -> None:
        rayzero.report({"step": loop.step})

    _, reports = run(OPEN, top=top)
    assert {(each.step, each.number, each.metrics["step"]) for each in reports} == {(n, 0, n) for n in range(STEPS)}


@pytest.mark.parametrize("transport", ["inproc", "grpc"])
@pytest.mark.parametrize(("where", "at"), [("top", OPEN), ("top", DECIDED), ("before_step", DECIDED), ("end", DECIDED)])
def test_frozen_parameters_are_written_once(where: str, at: Point, transport: str) -> None:
    """No step publishes another version of them."""

    def part(loop: Loop) -> None:
        if loop.step == 2:
            halve(loop)

    parts: dict[str, Any] = {where: part, "frozen": ("embed",), "transport": transport}
    require_same(run(at, **parts)[0], run(**parts)[0])


def test_a_write_that_the_state_has_no_room_for_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The repeat would end the iteration before again, and write again what the owners have got since."""

    def end(loop: Loop) -> None:
        if loop.step == 1:
            monkeypatch.setattr(keeper, "MOST_LOOP_STATE", 24 << 10)
            with torch.no_grad():
                loop.model.layers[0].up.weight.mul_(0.5)

    def before_step(loop: Loop) -> None:
        loop.optimizer.clip_grad_norm_(1.0)
        if loop.step == 2 and not loop.context.life:
            raise Killed

    with pytest.raises(StateLostError, match=r"cannot repeat step 2: it had written to 'layers\.0'"):
        run(("unknown", 0), end=end, before_step=before_step)


def again(loop: Loop, die: bool = False) -> None:
    """Take another batch if the first one's norm is too large."""
    if loop.step == 2 and float(loop.optimizer.clip_grad_norm_(0.5)) > 0:
        loop.optimizer.zero_grad()
        x, y = next(loop.batches)
        F.cross_entropy(loop.model(x).flatten(0, 1), y.flatten()).backward()
        if die and loop.context.rank == 0 and not loop.context.life:
            raise Killed
        loop.optimizer.clip_grad_norm_(0.5)


def test_gradients_that_one_of_several_ranks_dropped_are_not_mixed_with_others() -> None:
    """The others have gone on to their next ones, and compute the first ones no more."""
    with pytest.raises(StateLostError, match="cannot repeat step 2: it had dropped gradients"):
        run(("unknown", 0), world_size=2, before_step=functools.partial(again, die=True))


def test_a_single_rank_drops_gradients_again() -> None:
    plain, _ = run(before_step=again)
    require_same(run(("unknown", 0), before_step=functools.partial(again, die=True))[0], plain)
    require_same(run(DECIDED, before_step=again)[0], plain)


def test_a_step_that_took_more_batches_because_of_a_loss_is_refused_by_name() -> None:
    """With newer weights the loss is another one: the loader would be at another place."""

    def before_step(loop: Loop) -> None:
        if loop.step == 2 and not loop.context.life:  # as if by the loss
            loop.model(next(loop.batches)[0])

    with pytest.raises(StateLostError, match="after 1 forward in training mode, and came there after 2"):
        run(DECIDED, before_step=before_step)
