"""The user's dispatch and function modes see the operations of plain PyTorch: the engine works outside of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._debug_mode import DebugMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import rayzero
from rayzero import ZeroConfig
from rayzero.engine.context import RankContext, running_in
from rayzero.modes import MachineMode, outside_modes
from tests.support.modes import Functions, Operations

from .models import WIDTH, Net, same_bits, seeded, token_loss, tokens
from .models import tight as _tight

AdamW = partial(torch.optim.AdamW, lr=0.01, fused=True)


class Seen(ExitStack):
    """Both modes."""

    def __init__(self) -> None:
        super().__init__()
        self.operations, self.functions = Operations(), Functions()

    def __enter__(self) -> Seen:
        self.enter_context(self.operations)
        self.enter_context(self.functions)
        return self


class Adapted(nn.Module):
    """A frozen linear layer in bf16 with a trained adapter beside it, as in docs/howto/lora.md."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(4, WIDTH) / 4)
        self.up = nn.Parameter(torch.zeros(WIDTH, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.base(x) + nn.functional.linear(nn.functional.linear(x, self.down), self.up)


def adapted(wrap: Any = None) -> nn.Module:
    net = Net(num_layers=0, wrap=wrap).requires_grad_(False)
    net.layers = nn.ModuleList(Adapted() for _ in range(4))
    net.embed.requires_grad_(True)  # a reentrant checkpoint needs an input with a gradient
    return net


def whole(model: nn.Module, **settings: Any) -> ZeroConfig:
    """A config under which the whole model stays up."""
    return ZeroConfig(auto_memory_management="off", **settings)


def scaled(model: nn.Module) -> None:
    """Write every weight by hand, in place."""
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.9)


def untouched(model: nn.Module) -> None:
    """Write nothing."""


tight = partial(_tight, auto_memory_management="off")
two_units = partial(tight, async_prefetch=False, spare=0)
two_parts = partial(tight, async_prefetch=False, spare=1)  # of a layer: frozen, trained
offloaded = {"offload_activations": ("layers.?",), "activation_min_bytes": 512}
Setting = tuple[Callable[..., nn.Module], Callable[..., ZeroConfig], Callable[[nn.Module], None], int]
SETTINGS: dict[str, Setting] = {  # model, config, what is written before each forward, backwards a step
    "the whole model up": (Net, whole, untouched, 1),
    "two units": (Net, two_units, untouched, 1),
    "prefetched": (Net, partial(tight, prefetch_buffer_size=1), untouched, 1),
    "sums on the device": (Net, partial(two_units, offload_grads=False), untouched, 1),
    "written": (Net, two_units, scaled, 1),
    "accumulated": (Net, partial(two_units, gradient_accumulation_steps=2), untouched, 2),
    "adapters": (adapted, two_parts, untouched, 1),
    "encoded": (adapted, partial(two_parts, cpu_compression="lossless"), untouched, 1),
    "activations offloaded": (Net, partial(two_units, **offloaded), untouched, 1),
    "activations offloaded, the whole model up": (Net, partial(whole, **offloaded), untouched, 1),
}


def by_name(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep results of matrix products and copies, as a user's policy may."""
    kept = ("addmm", "mm", "bmm", "copy_", "_to_copy", "fill_", "where")
    return CheckpointPolicy.MUST_SAVE if func.overloadpacket.__name__ in kept else CheckpointPolicy.PREFER_RECOMPUTE


def everything(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep every result but views, which would hold whole units."""
    return CheckpointPolicy.PREFER_RECOMPUTE if func.is_view else CheckpointPolicy.MUST_SAVE


def selective(policy: Any) -> Any:
    return partial(checkpoint, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, policy))


WRAPS: dict[str, Any] = {
    "plain": None,
    "reentrant": partial(checkpoint, use_reentrant=True),
    "non-reentrant": partial(checkpoint, use_reentrant=False),
    "selective, products": selective(by_name),
    "selective, everything": selective(everything),
}


def trained(
    base: nn.Module, setting: Setting, mode: Callable[[], Any], *, plain: bool, steps: int = 2
) -> tuple[dict[str, Tensor], list[Any]]:
    """Complete weights after the steps, and each step's modes, which were on around forward and backward."""
    model = copy.deepcopy(base)
    config, write, backwards = setting[1:]
    optimizer: Any = AdamW([param for param in model.parameters() if param.requires_grad])
    with running_in(RankContext()):
        if not plain:
            model, optimizer = rayzero.prepare(model, optimizer, config(model))
        modes = []
        for step in range(steps):
            write(model)
            modes.append(mode())
            batches = [tokens(step, part) for part in range(backwards)]
            with modes[-1]:
                for batch in batches:
                    token_loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        return (model.state_dict() if plain else rayzero.full_state_dict(model)), modes


def both(base: nn.Module, setting: Setting, mode: Callable[[], Any]) -> tuple[list[Any], list[Any]]:
    """The modes of a training under RayZero and of plain PyTorch's, which have the same weights."""
    (state, ours), (expected, theirs) = (trained(base, setting, mode, plain=plain) for plain in (False, True))
    assert same_bits(state, expected)
    return ours, theirs


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_modes_see_what_they_see_of_plain_pytorch(setting: str, wrap: str) -> None:
    build = SETTINGS[setting][0]
    ours, theirs = both(seeded(lambda: build(wrap=WRAPS[wrap])), SETTINGS[setting], Seen)
    assert [mode.functions.seen for mode in ours] == [mode.functions.seen for mode in theirs]
    assert [_own(mode.operations) for mode in ours] == [_own(mode.operations) for mode in theirs]


@pytest.mark.spread(5)
@pytest.mark.parametrize("setting", SETTINGS)
def test_flops_and_debug_records_are_those_of_plain_pytorch(setting: str) -> None:
    build = SETTINGS[setting][0]
    base = seeded(lambda: build(wrap=WRAPS["selective, products"]))
    ours, theirs = both(base, SETTINGS[setting], partial(FlopCounterMode, display=False))
    assert [mode.get_flop_counts() for mode in ours] == [mode.get_flop_counts() for mode in theirs]
    ours, theirs = both(base, SETTINGS[setting], partial(DebugMode, record_torchfunction=True))
    assert _calls(ours[-1]) == _calls(theirs[-1])


def _own(mode: Operations) -> list[str]:
    """What it saw, without the sums of several backwards, which are made where the gradients go."""
    return [name for name in mode.seen if name != "aten.add_.Tensor"]


def _calls(mode: Any) -> list[str]:
    """What a DebugMode recorded, without what ``_own`` leaves out."""
    return [
        line for line in mode.debug_string().splitlines() if "aten::detach" not in line and "aten::add_" not in line
    ]


def test_hooks_below_the_engines_run_inside_the_users_modes() -> None:
    model = seeded(Net)
    with running_in(RankContext()), Operations() as mode:
        model, _ = rayzero.prepare(model, AdamW(model.parameters()), two_units(model))
        with torch.autograd.graph.saved_tensors_hooks(Tensor.clone, Tensor.abs):
            loss = token_loss(model, tokens(0))
        before = len(mode.seen)
        loss.backward()
    assert "aten.clone.default" in mode.seen[:before]
    assert "aten.abs.default" in mode.seen[before:]


class Machine(MachineMode):
    """Notes operations, as a simulated device does."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("fails", [False, True])
def test_modes_are_left_and_come_back_in_their_order(fails: bool) -> None:
    one = torch.ones(2)

    @outside_modes
    def work() -> Tensor:
        torch.add(one, one)
        if fails:
            raise KeyError
        return one

    with FakeTensorMode(allow_non_fake_inputs=True), Operations() as low, Machine() as machine, Operations() as high:
        with Functions() as function, pytest.raises(KeyError) if fails else nullcontext():
            work()
        assert (low.seen, machine.seen, high.seen, function.seen) == ([], 1, [], [])
        torch.add(one, one)
        stack = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
        assert [type(mode) for mode in stack] == [FakeTensorMode, Operations, Machine, Operations]
        assert stack[1] is low
        assert len(high.seen) == 1
