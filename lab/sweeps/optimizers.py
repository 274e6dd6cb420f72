"""All optimizer classes of torch, timm, bitsandbytes, torchao, pytorch-optimizer, torch-optimi, heavyball and
emerging-optimizers, beside plain torch.

The packages are not among RayZero's: `.venv/bin/pip install -c constraints.txt --no-deps timm bitsandbytes torchao
pytorch-optimizer torch-optimi heavyball triton opt-einsum`, and `... --ignore-requires-python emerging-optimizers`,
which asks for Python 3.12. One that is missing is a row of the table.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import inspect
import sys
import tempfile
import types
import typing
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .trial import NOT_TRIED, REFUSED, ROUNDING, SAME, WRONG, Case, Outcome

TITLE = "Optimizers that were tried"
INTRO = """
Each class trains a small model with `rayzero.prepare` and beside it in plain PyTorch: a convolution, matrices of up to
16,384 elements, vectors of odd lengths; six steps, with another rate from the fourth on. The run is also resumed from
its third step. *same*: every weight has equal bits, also after the resume. *rounding*: the largest difference, as a
part of the longest way of a weight; torch rounds a tensor's last elements otherwise, and Adam here has the bits of
`AdamW(fused=True)`, which plain PyTorch does not use by default on a CPU (these rows have `fused=True` as an option).
*refused*: by an error that says why, before a value is changed. Beside the others is whether owners run the class *on
shards* or *on whole parameters* of that model. Options other than the class's defaults are named. A class that wants
groups with `use_muon` has two, and one that takes matrices only has the matrices, beside an AdamW. heavyball's classes
run without torch.compile.
"""
PACKAGES = [
    "torch",
    "timm",
    "bitsandbytes",
    "torchao",
    "pytorch-optimizer",
    "torch-optimi",
    "heavyball",
    "emerging-optimizers",
]

_MODULES = {
    "torch": "torch.optim",
    "timm": "timm.optim",
    "bitsandbytes": "bitsandbytes.optim",
    "torchao": "torchao.optim",
    "pytorch-optimizer": "pytorch_optimizer",
    "torch-optimi": "optimi",
    "heavyball": "heavyball",
    "emerging-optimizers": "emerging_optimizers",
}
_ROOMS = ("orthogonalized_optimizers", "psgd", "riemannian_optimizers", "scalar_optimizers", "soap")  # of the last one
_OPTIONS: dict[str, Any] = {  # each is tried alone, where a constructor has an argument of that name
    "fused": True,
    "momentum": 0.9,
    "amsgrad": True,
    "centered": True,
    "caution": True,
    "cautious": True,
    "ams_bound": True,
    "optim_bits": 8,
    "decouple_lr": True,
    "rectify": True,
    "adanorm": True,
}
_STEPS, _SAVED, _RATE_FROM = 6, 3, 3
_CLOSE = 1e-3  # of the longest way of a weight: by how much rounding alone may make weights differ

Make = Callable[[list[nn.Parameter]], list[torch.optim.Optimizer]]


def cases() -> Iterator[Case]:
    """A case for each class and option; packages are imported here, once for all processes."""
    warnings.simplefilter("ignore")
    importlib.import_module("rayzero")
    importlib.import_module("torch._dynamo")  # making an optimizer imports it, which takes seconds
    for package, module in _MODULES.items():
        try:
            found = _imported(module)
        except ImportError as exc:
            yield Case(module, partial(Outcome, NOT_TRIED, f"{package} cannot be imported: {exc}"))
            continue
        for name in sorted(dir(found)):
            cls = getattr(found, name)
            if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer) and _is_of(cls, module):
                yield from _cases_of(f"{module}.{name}", cls)


def _imported(module: str) -> types.ModuleType:
    if module == "timm.optim" and _is_installed("timm") and not _is_installed("torchvision"):
        # timm imports torchvision, whose wheels need another torch; its optimizers take one name of its other modules
        package, models = types.ModuleType("timm"), types.ModuleType("timm.models")
        package.__path__ = list(importlib.util.find_spec("timm").submodule_search_locations or ())  # type: ignore[union-attr]
        models.group_parameters = None  # type: ignore[attr-defined]
        sys.modules |= {"timm": package, "timm.models": models}
    found = importlib.import_module(module)
    if module == "heavyball":
        found.utils.compile_mode = found.utils.compile_mode_recommended_to_none = None
    if module == "emerging_optimizers":
        typing.override = getattr(typing, "override", lambda method: method)  # type: ignore[attr-defined]  # of 3.12
        for room in _ROOMS:
            of_room = vars(importlib.import_module(f"{module}.{room}"))
            vars(found).update({name: of_room[name] for name in of_room if not name.startswith("_")})
    return found


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _is_of(cls: type, module: str) -> bool:
    return cls is not torch.optim.Optimizer and cls.__module__.startswith(module.partition(".")[0])


def _cases_of(name: str, cls: type[torch.optim.Optimizer]) -> Iterator[Case]:
    accepted = inspect.signature(cls).parameters
    lr = {"lr": 1e-3} if "lr" in accepted else {}
    yield Case(name, partial(_tried, cls, lr))
    for option, value in _OPTIONS.items():
        if option in accepted:
            yield Case(f"{name}({option}={value!r})", partial(_tried, cls, lr | {option: value}))


def _ways(cls: Any, options: dict[str, Any]) -> list[Make]:
    """How an instance may be made: over all parameters; with matrices in a group of their own; of matrices alone."""

    def divided(params: list[nn.Parameter]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        return [param for param in params if param.dim() == 2], [param for param in params if param.dim() != 2]

    def in_groups(params: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
        groups = zip(divided(params), (True, False), strict=True)
        return [cls([{"params": own, "use_muon": muon} for own, muon in groups], **options)]

    def beside(params: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
        matrices, others = divided(params)
        return [cls(matrices, **options), torch.optim.AdamW(others, fused=True)]

    return [lambda params: [cls(params, **options)], in_groups, beside]


def _way(cls: Any, options: dict[str, Any]) -> Make:
    """The first of them that plain PyTorch trains with, or else that makes one. Raises what the first one raises if
    there is none."""
    made, first = list[Make](), list[Exception]()
    for make in _ways(cls, options):
        model = _net()
        try:
            optimizers = make(list(model.parameters()))
            made.append(make)
            _train(model, optimizers, range(2))
        except Exception as exc:
            first.append(exc)
        else:
            return make
    if not made:
        raise first[0]
    return made[0]


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 7, 5)  # 525 elements
        self.wide = nn.Linear(7 * 16, 133)  # 14,896 and 133
        self.norm = nn.LayerNorm(133)
        self.square = nn.Linear(133, 64)  # 8,512
        self.last = nn.Linear(64, 256, bias=False)  # 16,384
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.conv(x).flatten(1))
        out: Tensor = self.last(torch.tanh(self.square(self.norm(self.wide(x))))) * self.scale
        return out


def _net() -> _Net:
    torch.manual_seed(0)
    return _Net()


def _train(
    model: nn.Module, optimizers: Sequence[Any], steps: range, saved: Callable[[], object] = lambda: None
) -> None:
    for step in steps:
        if step == _RATE_FROM:
            for group in (each for part in optimizers for each in part.param_groups if "lr" in each):
                group["lr"] = _halved(group["lr"])
        numbers = torch.Generator().manual_seed(step)
        loss = model(torch.randn(4, 3, 8, 8, generator=numbers)).square().mean()
        loss.backward()
        for part in optimizers:
            part.step()
            part.zero_grad()
        if step + 1 == _SAVED:
            saved()


def _halved(rate: Any) -> Any:
    return rate.mul_(0.5) if isinstance(rate, Tensor) else rate * 0.5 if rate is not None else None


def _tried(cls: Any, options: dict[str, Any]) -> Outcome:
    import rayzero
    from rayzero.engine.context import RankContext, running_in
    from rayzero.errors import RayZeroError

    torch.set_num_threads(1)
    first = {name: value.clone() for name, value in _net().state_dict().items()}
    try:
        make = _way(cls, options)
    except Exception as exc:
        return Outcome(NOT_TRIED, f"made from parameters alone it raises {type(exc).__name__}: {exc}")
    plain = _net()
    theirs = make(list(plain.parameters()))
    found: list[dict[str, Tensor]] = []
    with tempfile.TemporaryDirectory() as folder:
        for resume in (None, Path(folder) / "at-3"):
            with running_in(RankContext()):
                model = _net()
                given = make(list(model.parameters()))
                try:
                    model, optimizer = rayzero.prepare(model, given[0] if len(given) == 1 else given, resume=resume)
                except RayZeroError as exc:
                    return Outcome(REFUSED if resume is None else WRONG, str(exc))
                if resume is None:
                    save = partial(rayzero.save_checkpoint, optimizer, Path(folder) / "at-3")
                    _train(model, [optimizer], range(_STEPS), save)
                else:
                    _train(model, [optimizer], range(_SAVED, _STEPS))
                whole = optimizer.engine.layout.whole_parameters
                found.append(rayzero.full_state_dict(model))
                states = [copy.deepcopy(each.state_dict()) for each in ([optimizer] if len(given) == 1 else given)]
    _train(plain, theirs, range(_STEPS))
    for part, ours in zip(theirs, states, strict=True):
        if (lost := _lost(torch.optim.Optimizer.state_dict(part), ours)) != "":
            return Outcome(WRONG, f"state_dict() lacks {lost}")
    outcome = _compared(first, plain.state_dict(), found)
    where = ("on whole parameters" if whole else "on shards") + (", beside an AdamW" if len(theirs) > 1 else "")
    return Outcome(outcome.kind, f"{where}; {outcome.why}" if outcome.why else where)


def _lost(plain: dict[str, Any], ours: dict[str, Any]) -> str:
    """What our state dict has not that plain PyTorch's has."""
    groups = zip(plain["param_groups"], ours["param_groups"], strict=True)
    missing = [f"entry {name!r} of a group" for theirs, mine in groups for name in theirs.keys() - mine.keys()]
    for key, state in plain["state"].items():
        missing += [f"{name!r} of parameter {key}" for name in state.keys() - ours["state"].get(key, {}).keys()]
    return ", ".join(missing[:3])


def _compared(first: dict[str, Tensor], plain: dict[str, Tensor], found: list[dict[str, Tensor]]) -> Outcome:
    way = max(float((value - first[name]).abs().max()) for name, value in plain.items())
    apart = max(float((ours[name] - value).abs().max()) for ours in found for name, value in plain.items())
    if not all(bool(value.isfinite().all()) for ours in found for value in ours.values()):
        return Outcome(WRONG, "weights are not finite")
    if all(torch.equal(ours[name], value) for ours in found for name, value in plain.items()):
        return Outcome(SAME)
    return Outcome(ROUNDING if apart <= _CLOSE * way else WRONG, f"{apart / way:.1e} of the longest way")
