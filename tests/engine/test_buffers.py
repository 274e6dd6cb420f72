"""Buffers of all kinds: what a checkpoint holds of them, and which are refused by name before anything changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rayzero
from rayzero.engine.context import RankContext, running_in
from rayzero.engine.full_values import load_checkpoint
from rayzero.errors import CheckpointError, UnsupportedError

pytestmark = pytest.mark.filterwarnings(
    "ignore:Sparse .* tensor support is in beta state", "ignore:.*nested tensors", "ignore:.*[Qq]uantiz"
)
Make = Callable[[], Tensor]


class Buffered(nn.Module):
    """Two layers and a buffer that scales what is between them, by its dense sum."""

    def __init__(self, buffer: Tensor, *, persistent: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("kept", buffer, persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


class Wrapping(Tensor):
    """A tensor around another one."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapping:
        made: Wrapping = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner  # type: ignore[attr-defined]
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].inner)
        raise NotImplementedError(func)


def ramp() -> Tensor:
    return torch.arange(16.0).view(4, 4)


def spiral() -> Tensor:
    return torch.complex(ramp(), -ramp())


def prepared(model: nn.Module) -> tuple[nn.Module, Any]:
    return rayzero.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def step(model: nn.Module, optimizer: Any) -> None:
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


UNSAVEABLE: dict[str, tuple[Make, str]] = {
    "coo": (lambda: ramp().to_sparse(), "layout torch.sparse_coo"),
    "csr": (lambda: ramp().to_sparse_csr(), "layout torch.sparse_csr"),
    "csc": (lambda: ramp().to_sparse_csc(), "layout torch.sparse_csc"),
    "bsr": (lambda: ramp().to_sparse_bsr((2, 2)), "layout torch.sparse_bsr"),
    "mkldnn": (lambda: ramp().to_mkldnn(), "layout torch._mkldnn"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(3), torch.ones(4)]), "nested"),
    "jagged": (
        lambda: torch.nested.nested_tensor([torch.ones(3), torch.ones(4)], layout=torch.jagged),
        "nested",
    ),
    "complex128": (lambda: spiral().to(torch.complex128), "dtype complex128"),
    "quantized": (lambda: torch.quantize_per_tensor(ramp(), 0.5, 0, torch.qint8), "dtype qint8"),
    "wrapper": (lambda: Wrapping(ramp()), r"test_buffers\.Wrapping, which wraps"),
}


@pytest.mark.parametrize("kind", UNSAVEABLE)
def test_a_persistent_buffer_that_no_checkpoint_can_hold_is_refused_by_name(kind: str, alone: RankContext) -> None:
    make, why = UNSAVEABLE[kind]
    with pytest.raises(UnsupportedError, match=rf"buffer 'kept' is .*{why}.*persistent=False"):
        prepared(Buffered(make()))


@pytest.mark.parametrize("kind", sorted(UNSAVEABLE.keys() - {"wrapper"}))
def test_a_buffer_of_that_kind_that_is_not_persistent_trains_and_saves(
    kind: str, alone: RankContext, tmp_path: Path
) -> None:
    model, optimizer = prepared(Buffered(UNSAVEABLE[kind][0](), persistent=False))
    step(model, optimizer)
    rayzero.save_checkpoint(optimizer, tmp_path / "a")
    assert (tmp_path / "a").is_dir()


SAVEABLE: dict[str, tuple[Make, Make]] = {  # what is saved; what a new model has before it resumes
    "conjugate": (lambda: spiral().conj(), lambda: torch.zeros(4, 4, dtype=torch.complex64).conj()),
    "negative": (lambda: spiral().conj().imag, lambda: torch.zeros(4, 4, dtype=torch.complex64).conj().imag),
    "expanded": (lambda: torch.arange(4.0).view(4, 1).expand(4, 4), lambda: torch.zeros(4, 1).expand(4, 4)),
    "expanded NaN": (lambda: torch.full((1,), torch.nan).expand(3), lambda: torch.zeros(1).expand(3)),
    "once expanded": (lambda: torch.arange(4.0).expand(4, 4), lambda: torch.zeros(4, 4)),
    "now expanded": (lambda: torch.arange(4.0).repeat(4, 1), lambda: torch.zeros(4).expand(4, 4)),
    "overlapping": (lambda: torch.arange(6.0).unfold(0, 3, 1), lambda: torch.zeros(6).unfold(0, 3, 1)),
    "transposed": (lambda: ramp().t(), lambda: torch.zeros(4, 4)),
    "empty": (lambda: torch.empty(0, 3), lambda: torch.empty(0, 3)),
    "scalar": (lambda: torch.tensor(3), lambda: torch.tensor(0)),
    "with a gradient": (lambda: ramp().requires_grad_(), lambda: torch.zeros(4, 4, requires_grad=True)),
}


@pytest.mark.parametrize("kind", SAVEABLE)
def test_a_resumed_model_has_the_values_of_a_buffer_whatever_its_strides(
    kind: str, alone: RankContext, tmp_path: Path
) -> None:
    saved, fresh = SAVEABLE[kind]
    model, optimizer = prepared(Buffered(saved()))
    rayzero.save_checkpoint(optimizer, tmp_path / "a")
    again = Buffered(fresh())
    with running_in(RankContext(resume=tmp_path / "a")):
        prepared(again)
        assert torch.equal(again.kept.nan_to_num(-1.0), model.kept.nan_to_num(-1.0))
        assert again.kept.stride() == fresh().stride(), "it is the model's own tensor that was filled"


def test_values_that_an_expanded_buffer_cannot_have_are_refused(alone: RankContext, tmp_path: Path) -> None:
    _, optimizer = prepared(Buffered(ramp()))
    rayzero.save_checkpoint(optimizer, tmp_path / "a")
    again = Buffered(torch.zeros(4).expand(4, 4))
    with running_in(RankContext(resume=tmp_path / "a")), pytest.raises(CheckpointError, match="'kept' is expanded"):
        prepared(again)
    assert not again.kept.any()


def test_a_buffer_that_is_a_view_of_a_parameter_is_refused(alone: RankContext) -> None:
    model = Buffered(torch.zeros(1))
    model.kept = model.up.weight.data[1]
    with pytest.raises(UnsupportedError, match=r"'kept' is a view of parameter 'up\.weight'.*clone"):
        prepared(model)
    model.kept = model.up.weight.detach().clone()
    prepared(model)


def test_a_buffer_that_only_shares_a_storage_with_a_parameter_is_none(alone: RankContext) -> None:
    whole = torch.arange(20.0)
    model = Buffered(whole[16:])
    model.up.weight = nn.Parameter(whole[:16].view(4, 4))
    model, optimizer = prepared(model)
    step(model, optimizer)
    assert model.kept.tolist() == [16, 17, 18, 19]


def test_a_buffer_that_became_unsaveable_is_refused_by_the_save_and_leaves_nothing(
    alone: RankContext, tmp_path: Path
) -> None:
    model, optimizer = prepared(Buffered(ramp()))
    model.kept = ramp().to_sparse()
    with pytest.raises(UnsupportedError, match=r"'kept' is a tensor of layout torch\.sparse_coo"):
        rayzero.save_checkpoint(optimizer, tmp_path / "a")
    assert list(tmp_path.iterdir()) == []
    model.kept = ramp()
    rayzero.save_checkpoint(optimizer, tmp_path / "a")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda model: setattr(model, "kept", torch.zeros(1)), r"'kept' has shape \[4, 4\], the model's \[1\]"),
        (lambda model: model.register_buffer("further", torch.zeros(1)), "it lacks buffer 'further'"),
        (lambda model: model.register_buffer("kept", None), "the model has no buffer 'kept'"),
    ],
    ids=["shape", "absent", "unknown"],
)
@pytest.mark.parametrize("load", [False, True], ids=["resume", "load_checkpoint"])
def test_a_checkpoint_with_other_buffers_is_refused_before_anything_changes(
    change: Callable[[nn.Module], None], says: str, load: bool, alone: RankContext, tmp_path: Path
) -> None:
    _, optimizer = prepared(Buffered(ramp()))
    rayzero.save_checkpoint(optimizer, tmp_path / "a")
    other = Buffered(torch.zeros(4, 4))
    change(other)
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with running_in(RankContext(resume=None if load else tmp_path / "a")):
        if load:
            other, optimizer = prepared(other)
        with pytest.raises(CheckpointError, match=says):
            load_checkpoint(optimizer, tmp_path / "a") if load else prepared(other)
        assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())
