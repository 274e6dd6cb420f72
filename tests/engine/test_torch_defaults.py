"""What a program sets for all of torch (default dtype and device, inference mode, autocast, deterministic algorithms)
changes nothing that RayZero keeps, returns or writes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rayzero
from rayzero import HybridDeviceOptimizer, ZeroConfig
from rayzero.engine.context import RankContext, running_in

from .models import Net, seeded, tight, token_loss, tokens

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": partial(torch.optim.AdamW, lr=0.01, fused=True, amsgrad=True),
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.01, initial_accumulator_value=0.3),
    "NAdam": partial(torch.optim.NAdam, lr=0.01),
    "RMSprop": partial(torch.optim.RMSprop, lr=0.01, momentum=0.9, centered=True),
    "Rprop": partial(torch.optim.Rprop, lr=0.01),
    "Adadelta": partial(torch.optim.Adadelta, lr=0.3),
}
SETTINGS: dict[str, Callable[[nn.Module], ZeroConfig]] = {
    "two units": partial(tight, async_prefetch=False, spare=0, auto_memory_management="off"),
    "everything up": lambda _: ZeroConfig(auto_memory_management="off"),
    "sums on the device": partial(tight, offload_grads=False, spare=0, auto_memory_management="off"),
    "activations offloaded": partial(
        tight, offload_activations=("layers.?",), activation_min_bytes=512, spare=0, auto_memory_management="off"
    ),
}


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)  # torch.empty is filled with NaN
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


DEFAULTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "float64": partial(default_dtype, torch.float64),
    "bfloat16": partial(default_dtype, torch.bfloat16),
    "float16": partial(default_dtype, torch.float16),
    "meta": partial(default_device, "meta"),
    "in meta": partial(torch.device, "meta"),
    "deterministic": deterministic,
}
AROUND_CALLS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
    "autocast": partial(torch.autocast, "cpu", dtype=torch.bfloat16),
}


def trained(
    base: nn.Module,
    make: Callable[..., torch.optim.Optimizer],
    setting: Callable[[nn.Module], ZeroConfig],
    folder: Path,
    *,
    around_prepare: Callable[[], AbstractContextManager[Any]] = nullcontext,
    around_calls: Callable[[], AbstractContextManager[Any]] = nullcontext,
    around_passes: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> dict[str, Any]:
    """All that a run returns, keeps and restores: two steps, a checkpoint, one step; that step again, resumed."""

    def steps(model: nn.Module, optimizer: Any, numbers: range) -> None:
        for step in numbers:
            batch = tokens(step)
            with around_passes():
                token_loss(model, batch).backward()
            with around_calls():
                seen.append(optimizer.clip_grad_norm_(0.5))
                optimizer.step()
                optimizer.zero_grad()

    def shown(model: nn.Module, optimizer: Any) -> dict[str, Any]:
        with around_calls():
            return {
                "weights": rayzero.full_state_dict(model),
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "mean": rayzero.mean_over_ranks({"a": 0.1, "b": torch.tensor(0.3, dtype=torch.float32, device="cpu")}),
            }

    seen: list[Any] = []
    found: dict[str, Any] = {"norms": seen}
    for name, numbers in (("first", range(2)), ("resumed", range(2, 3))):
        model = copy.deepcopy(base)
        optimizer: Any = make(model.parameters())
        with running_in(RankContext()):
            with around_prepare():
                resume = None if name == "first" else folder
                model, optimizer = rayzero.prepare(model, optimizer, setting(model), resume=resume)
            steps(model, optimizer, numbers)
            found[name] = shown(model, optimizer)
            with around_calls():
                if name == "first":
                    rayzero.save_checkpoint(optimizer, folder)
                else:
                    state = optimizer.state_dict()
                    optimizer.load_state_dict(state)
                    model.load_state_dict(rayzero.full_state_dict(model))
            if name == "resumed":
                steps(model, optimizer, range(3, 4))
                found["loaded"] = shown(model, optimizer)
    return found


def differing(ours: Any, theirs: Any, path: str = "") -> list[str]:
    """Where two nested values differ: in bits, dtype or device."""
    if isinstance(ours, Tensor) and ours.dim() == 0 and ours.dtype is torch.float64:
        ours = ours.to(theirs.dtype)  # torch's own optimizers count steps in the default dtype if that is float64
    if isinstance(theirs, Tensor):
        same = isinstance(ours, Tensor) and (ours.dtype, ours.device) == (theirs.dtype, theirs.device)
        return [] if same and torch.equal(ours, theirs) else [f"{path}: {ours!r:.60} instead of {theirs!r:.60}"]
    if isinstance(theirs, dict):
        assert list(ours) == list(theirs)
        return [line for key in theirs for line in differing(ours[key], theirs[key], f"{path}.{key}")]
    if isinstance(theirs, list | tuple):
        assert len(ours) == len(theirs)
        return [
            line for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) for line in differing(a, b, f"{path}[{i}]")
        ]
    return [] if ours == theirs else [f"{path}: {ours!r} instead of {theirs!r}"]


@cache
def net() -> nn.Module:
    return seeded(Net)


@cache
def _expected(optimizer: str, setting: str, folder: Path) -> dict[str, Any]:
    return trained(net(), OPTIMIZERS[optimizer], SETTINGS[setting], folder / f"{optimizer} {setting}")


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], dict[str, Any]]:
    """What a run without any setting of torch gives."""
    folder = tmp_path_factory.mktemp("expected")
    return lambda optimizer, setting: _expected(optimizer, setting, folder)


CASES = [("AdamW", setting, default) for setting in SETTINGS for default in DEFAULTS] + [
    (optimizer, "two units", default)
    for optimizer in OPTIMIZERS
    for default in DEFAULTS
    if optimizer != "AdamW" and (optimizer, default) != ("NAdam", "float64")  # torch's own then has a float64 product
]


@pytest.mark.spread(5)
@pytest.mark.parametrize("when", ["before prepare", "after prepare"])
@pytest.mark.parametrize(("optimizer", "setting", "default"), CASES)
def test_a_default_of_torch_changes_nothing(
    optimizer: str, setting: str, default: str, when: str, tmp_path: Path, expected: Callable[[str, str], Any]
) -> None:
    around = {"around_calls": DEFAULTS[default], "around_passes": DEFAULTS[default]}
    if when == "before prepare":
        around["around_prepare"] = DEFAULTS[default]
    got = trained(net(), OPTIMIZERS[optimizer], SETTINGS[setting], tmp_path / "saved", **around)
    assert differing(got, expected(optimizer, setting)) == []


@pytest.mark.parametrize("mode", AROUND_CALLS)
@pytest.mark.parametrize("optimizer", ["AdamW", "Adagrad"])
def test_a_mode_of_torch_around_calls_changes_nothing(
    optimizer: str, mode: str, tmp_path: Path, expected: Callable[[str, str], Any]
) -> None:
    got = trained(
        net(), OPTIMIZERS[optimizer], SETTINGS["two units"], tmp_path / "saved", around_calls=AROUND_CALLS[mode]
    )
    assert differing(got, expected(optimizer, "two units")) == []


def hybrid(default: Callable[[], AbstractContextManager[Any]], *options: Any) -> tuple[Any, Any]:
    model = copy.deepcopy(net())
    with default():
        optimizer = HybridDeviceOptimizer(model.parameters(), 0.5, *options, lr=0.01)
    for step in range(2):
        batch = tokens(step)
        with default():
            token_loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    with default():
        state = optimizer.state_dict()
        optimizer.load_state_dict(copy.deepcopy(state))
        return model.state_dict(), state


@pytest.mark.parametrize(  # torch's own Adagrad cannot step where it was made under a default device of meta
    ("cls", "default"),
    [(torch.optim.AdamW, default) for default in DEFAULTS]
    + [(torch.optim.Adagrad, default) for default in DEFAULTS if "meta" not in default],
)
def test_a_default_of_torch_changes_nothing_of_a_hybrid_optimizer(cls: type, default: str) -> None:
    assert differing(hybrid(DEFAULTS[default], cls), hybrid(nullcontext, cls)) == []
