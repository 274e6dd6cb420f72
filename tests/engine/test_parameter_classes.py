"""Parameters of other classes than nn.Parameter keep them: in forward, in touches, in copies."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import rayzero
from rayzero import ZeroConfig
from rayzero.engine.context import RankContext
from rayzero.errors import UnsupportedError

from .models import WIDTH, Block, Net, same_bits, seeded, tight, token_loss, tokens

_USED_BINARY = (F.linear, torch.matmul, Tensor.matmul)


def binary(value: Any) -> Any:
    """The sign of a binary weight, with the gradient of the identity."""
    if not isinstance(value, BinaryParameter | BinaryTensor):
        return value
    whole = value.as_subclass(Tensor)
    return (whole.sign() - whole).detach() + whole


class BinaryParameter(nn.Parameter):
    """A Parameter that linear layers use as its sign."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func in _USED_BINARY:
                args = tuple(map(binary, args))
            return func(*args, **(kwargs or {}))


class BinaryTensor(Tensor):
    """The same as a tensor class, which a Parameter keeps. What is computed from it is of this class, too."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _USED_BINARY:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*map(binary, args), **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)


class NamedParameter(nn.Parameter):
    """Code asks for its class, and for what only it has."""

    @property
    def gain(self) -> float:
        return 2.0 * self.extra

    extra = 1.0


class SlottedParameter(nn.Parameter):
    __slots__ = ("extra",)


class ClassyBlock(Block):
    """A block whose forward looks at its weights' classes."""

    def forward(self, x: Tensor) -> Tensor:
        for weight in (self.up.weight, self.down.weight):
            if isinstance(weight, NamedParameter):
                x = x * weight.gain
            if type(weight * 1) is BinaryTensor:
                x = x * 1.5
        return super().forward(x)


KINDS: dict[str, Callable[[Tensor], nn.Parameter]] = {
    "a subclass with torch functions": BinaryParameter,
    "a tensor class in a Parameter": lambda data: nn.Parameter(data.as_subclass(BinaryTensor)),
    "a subclass that code asks for": NamedParameter,
    "a subclass with slots": SlottedParameter,
}
CONFIGS: dict[str, Callable[[nn.Module], ZeroConfig]] = {
    "all up": lambda model: ZeroConfig(),
    "tight": lambda model: tight(model, prefetch_buffer_size=1),
    "bf16": lambda model: tight(model, prefetch_buffer_size=1, precision="bf16"),
}


def net(kind: str, wrap: Callable[..., Tensor] | None = None, *, frozen: bool = False) -> nn.Module:
    """Some of two blocks' weights are of a class, beside others of the same units that are not."""

    def build() -> nn.Module:
        model = Net(wrap=wrap)
        for i in (0, 1):
            model.layers[i] = ClassyBlock(WIDTH)
            model.layers[i].up.weight = KINDS[kind](model.layers[i].up.weight.detach())
        model.layers[1].down.weight = KINDS[kind](model.layers[1].down.weight.detach())
        model.layers[1].requires_grad_(not frozen)
        return model

    return seeded(build)


def sgd(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD([param for param in params if param.requires_grad], lr=0.1, momentum=0.9)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    losses = []
    for step in range(3):
        weight = model.layers[1].up.weight
        penalty = F.linear(torch.ones(1, WIDTH), weight.float()).float().mean()  # outside of its unit's forward
        loss = token_loss(model, tokens(step)) + 0.1 * penalty
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def checkpointed(layer: nn.Module, x: Tensor, *, reentrant: bool) -> Tensor:
    return checkpoint(layer, x, use_reentrant=reentrant)


def write(layer: nn.Module, _: Any) -> None:
    layer.up.weight.data.mul_(0.9)
    layer.up.weight.data = layer.up.weight.data * 0.9


WAYS: dict[str, dict[str, Any]] = {
    "all up": {},
    "all up, frozen": {"frozen": True},
    "tight": {},
    "tight, frozen": {"frozen": True},
    "tight, recomputed": {"wrap": partial(checkpointed, reentrant=False)},
    "tight, recomputed by a backward": {"wrap": partial(checkpointed, reentrant=True)},
    "tight, data written": {},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_parameters_keep_their_class(kind: str, way: str, alone: RankContext) -> None:
    plain, model = net(kind, **WAYS[way]), net(kind, **WAYS[way])
    config = CONFIGS[way.partition(",")[0]](model)
    model, optimizer = rayzero.prepare(model, sgd(model.parameters()), config)
    for one in (plain, model) if way.endswith("written") else ():
        one.layers[0].register_forward_pre_hook(write)
    assert train(model, optimizer) == train(plain, sgd(plain.parameters()))
    state = rayzero.full_state_dict(model)
    assert all(type(value) is Tensor for value in state.values())
    assert same_bits(state, {name: value.as_subclass(Tensor) for name, value in plain.state_dict().items()})


class Masters:
    """Plain PyTorch's step with bf16 parameters and fp32 masters. The model becomes bf16."""

    def __init__(self, model: nn.Module) -> None:
        self.pairs = [(param, param.detach().as_subclass(Tensor).clone()) for param in model.parameters()]
        self.optimizer = sgd([master.requires_grad_(param.requires_grad) for param, master in self.pairs])
        for param, master in self.pairs:
            param.data = param.data.bfloat16()
            assert torch.equal(param.detach().as_subclass(Tensor), master.bfloat16())

    def step(self) -> None:
        for param, master in self.pairs:
            master.grad = None if param.grad is None else param.grad.as_subclass(Tensor).float()
        self.optimizer.step()
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for param, master in self.pairs:
                param.copy_(master)

    def zero_grad(self) -> None:
        for param, _ in self.pairs:
            param.grad = None


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("kind", KINDS)
def test_parameters_keep_their_class_in_bf16(kind: str, frozen: bool, alone: RankContext) -> None:
    """Frozen ones of a class are never converted: the user does that."""
    plain, model = net(kind, frozen=frozen), net(kind, frozen=frozen)
    for one in (plain, model) if frozen else ():
        for param in one.layers[1].parameters():
            param.data = param.data.bfloat16()
    masters = Masters(plain)
    losses = train(plain, masters)  # type: ignore[arg-type]
    looks = []
    model.layers[1].register_forward_pre_hook(lambda layer, _: looks.append(_looks(layer.up.weight)[:3]))
    model, optimizer = rayzero.prepare(model, sgd(model.parameters()), CONFIGS["bf16"](model))
    assert train(model, optimizer) == losses
    assert looks[-1][2][1] is torch.bfloat16
    state = rayzero.full_state_dict(model)
    expected = {name: master for (name, _), (_, master) in zip(plain.named_parameters(), masters.pairs, strict=True)}
    assert same_bits(
        {name: state[name].float() for name in expected}, {n: m.detach().float() for n, m in expected.items()}
    )


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_made_of_such_a_parameter_is_as_in_plain_torch(kind: str, alone: RankContext) -> None:
    plain, model = net(kind), net(kind)
    model, _ = rayzero.prepare(model, sgd(model.parameters()), CONFIGS["tight"](model))
    seen: list[Any] = []
    for one in (plain, model):
        one.layers[0].register_forward_pre_hook(lambda layer, _: seen.append(_looks(layer.up.weight)))
        seen.append(_looks(one.layers[0].up.weight))
        one(tokens(0)[0])
    assert seen[:2] == seen[2:]


def _looks(weight: nn.Parameter) -> list[Any]:
    """What code can see of a Parameter."""
    found: list[Any] = [
        tuple(isinstance(weight, kind) for kind in (BinaryParameter, BinaryTensor, NamedParameter, nn.Parameter)),
        [type(made) for made in (weight.data, weight.detach(), weight * 1, weight.t())],
        (weight.shape, weight.dtype, weight.requires_grad, weight.is_leaf, repr(weight)),
    ]
    for duplicate in (copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))):
        try:
            made = duplicate(weight)
            found.append((type(made), made.requires_grad, made.tolist()))
        except RuntimeError as exc:  # torch copies no tensor class that it has not made itself
            found.append(str(exc)[:60])
    return found


class _Doubled(torch.autograd.Function):
    """Its backward asks for the class of the weight that it saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        _, weight = ctx.saved_tensors
        return grad * (2 if isinstance(weight, NamedParameter) else 3), None


def test_a_backward_of_the_users_own_that_reads_such_a_parameter_is_refused(alone: RankContext) -> None:
    """Torch unpacks what a hook has packed as a plain tensor."""
    model = net("a subclass that code asks for")
    model, _ = rayzero.prepare(model, sgd(model.parameters()), CONFIGS["tight"](model))
    model.layers[1].register_forward_pre_hook(lambda layer, args: _Doubled.apply(args[0], layer.up.weight))
    with pytest.raises(UnsupportedError, match=r"'layers.1.up.weight' .* NamedParameter"):
        token_loss(model, tokens(0)).backward()


class _Dispatched(Tensor):
    """Has memory, and operations of its own below autograd."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C._DisableTorchDispatch():
            return func(*args, **(kwargs or {})).as_subclass(cls)


class _Final(type(nn.Parameter)):  # type: ignore[misc]
    def __new__(mcs, name: str, bases: Any, names: Any) -> Any:
        if name != "SealedParameter":
            raise TypeError("SealedParameter has no subclasses")
        return super().__new__(mcs, name, bases, names)


class SealedParameter(nn.Parameter, metaclass=_Final):
    pass


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda data: nn.Parameter(data.as_subclass(_Dispatched)),
            r"'up.weight' is a _Dispatched, .* __torch_dispatch__",
        ),
        (SealedParameter, r"'up.weight' is a SealedParameter, .*SealedParameter has no subclasses"),
    ],
)
def test_a_class_that_cannot_be_kept_is_refused_by_name(
    make: Callable[[Tensor], nn.Parameter], says: str, alone: RankContext
) -> None:
    model = Block(WIDTH)
    model.up.weight = make(model.up.weight.detach())
    with pytest.raises(UnsupportedError, match=says):
        rayzero.prepare(model, sgd(model.parameters()))


def test_init_and_prepare_compute_nothing_with_such_a_parameter(alone: RankContext) -> None:
    """What is copied to the owners are the values, whatever the class makes of operations."""

    class Hostile(nn.Parameter):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in (Tensor.copy_, Tensor.detach, Tensor.to, torch.empty_like, Tensor.clone):
                return torch.zeros(())
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))

    model = Block(WIDTH)
    value = model.up.weight.detach().clone()
    model.up.weight = Hostile(value.clone())
    model, _ = rayzero.prepare(model, sgd(model.parameters()))
    assert torch.equal(rayzero.full_state_dict(model)["up.weight"], value)


class Relisted(nn.Module):
    """Merges an adapter into its weight each time its Parameters are listed, as PEFT's LoRA on MultiheadAttention
    does."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 4)

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        self.base.weight = nn.Parameter(self.base.weight.detach().clone(), requires_grad=False)
        return super().named_modules(*args, **kwargs)


def test_a_module_that_makes_its_parameters_anew_is_refused_by_name(alone: RankContext) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Relisted())
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    with pytest.raises(UnsupportedError, match=r"module '1\.base', a torch.*Linear, makes another .*'1\.base\.weight'"):
        rayzero.prepare(model, optimizer)
