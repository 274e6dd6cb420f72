"""Autograd: every way of running backward, of saving and recomputing, of looking on, and of compiling."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from engine.models import WIDTH, Block, Net, token_loss
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from .case import Case, Run, steps
from .engines import Setting

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"
    ),  # inductor imports it
    pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True:UserWarning"),
    pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning"),  # by torch.func.jvp
    # Dynamo reads .grad of non-leaf tensors.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]

# ---- checkpoints ------------------------------------------------------------------------------------------------


def reentrant(layer: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(layer, x, use_reentrant=True)


def non_reentrant(layer: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(layer, x, use_reentrant=False)


def nested(layer: nn.Module, x: Tensor) -> Tensor:
    def inner(y: Tensor) -> Tensor:
        return checkpoint(layer, y, use_reentrant=False)

    return checkpoint(inner, x, use_reentrant=False)


def nested_reentrant(layer: nn.Module, x: Tensor) -> Tensor:
    def inner(y: Tensor) -> Tensor:
        return checkpoint(layer, y, use_reentrant=True)

    return checkpoint(inner, x, use_reentrant=True)


class TwoAtOnce(Net):
    """Two blocks under one checkpoint."""

    def __init__(self) -> None:
        super().__init__(num_layers=4)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for first, second in zip(self.layers[::2], self.layers[1::2], strict=True):
            x = checkpoint(lambda y, a=first, b=second: b(a(y)), x, use_reentrant=False)
        return self.head(self.norm(x))


class Whole(Net):
    """All blocks under one checkpoint."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = checkpoint(lambda y: nn.Sequential(*self.layers)(y), self.embed(tokens), use_reentrant=False)
        return self.head(self.norm(x))


class Segments(Net):
    """torch's own checkpoint_sequential."""

    def forward(self, tokens: Tensor) -> Tensor:
        layers = nn.Sequential(*self.layers)
        return self.head(self.norm(checkpoint_sequential(layers, 2, self.embed(tokens), use_reentrant=False)))


class InsideCheckpoint(Net):
    """Blocks that checkpoint their own inside: recomputation does not go through the unit's forward."""

    class Inside(Block):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Inside(WIDTH) for _ in range(3))


class InsideReentrant(InsideCheckpoint):
    """The same with the reentrant checkpoint."""

    class Inside(Block):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=True)


def checkpointed(how: Callable[[nn.Module, Tensor], Tensor]) -> Callable[[], nn.Module]:
    return lambda: Net(wrap=how)


# ---- losses and backwards ---------------------------------------------------------------------------------------


@steps
def plain(run: Run, step: int) -> None:
    token_loss(run.model, run.batch(step)).backward()


@steps
def retain_graph(run: Run, step: int) -> None:
    loss = token_loss(run.model, run.batch(step))
    loss.backward(retain_graph=True)
    loss.backward()


@steps
def two_losses(run: Run, step: int) -> None:
    inputs, targets = run.batch(step)
    logits = run.model(inputs)
    logits.float().square().mean().backward(retain_graph=True)
    F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten()).backward()


@steps
def several_tensors(run: Run, step: int) -> None:
    logits = run.model(run.batch(step)[0])
    torch.autograd.backward([logits.float().square().mean(), logits.float().abs().mean()])


@steps
def two_forwards(run: Run, step: int) -> None:
    inputs, targets = run.batch(step)
    (token_loss(run.model, (inputs, targets)) + token_loss(run.model, (targets, inputs))).backward()


@steps
def weights_in_loss(run: Run, step: int) -> None:
    penalty = sum(p.square().sum() for p in run.model.parameters())
    (token_loss(run.model, run.batch(step)) + 1e-3 * penalty).backward()


@steps
def graph_of_the_last_step(run: Run, step: int) -> None:
    """A graph that lives over the backward of another one."""
    first = token_loss(run.model, run.batch(step))
    second = token_loss(run.model, run.batch(step + 5))
    second.backward()
    first.backward()


@steps
def some_inputs(run: Run, step: int) -> None:
    chosen = [run.model.layers[0].up.weight, run.model.layers[2].down.bias]
    token_loss(run.model, run.batch(step)).backward(inputs=chosen)


@steps
def gradients_by_grad(run: Run, step: int) -> None:
    params = [p for p in run.model.parameters() if p.requires_grad]
    grads = torch.autograd.grad(token_loss(run.model, run.batch(step)), params)
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad


@steps
def gradients_by_hand(run: Run, step: int) -> None:
    for param in run.model.parameters():
        param.grad = torch.full_like(param, 0.25 * (1 + run.rank))


# ---- double backward --------------------------------------------------------------------------------------------


@steps
def gradient_penalty(run: Run, step: int) -> None:
    """On the norm of the gradient by the parameters."""
    loss = token_loss(run.model, run.batch(step))
    grads = torch.autograd.grad(loss, list(run.model.parameters()), create_graph=True)
    (loss + sum(g.square().sum() for g in grads)).backward()


@steps
def create_graph(run: Run, step: int) -> None:
    token_loss(run.model, run.batch(step)).backward(create_graph=True)
    for param in run.model.parameters() if run.engine == "torch" else ():
        param.grad = None if param.grad is None else param.grad.detach()


class Features(nn.Module):
    """Takes floating inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(8, WIDTH)
        self.layers = nn.ModuleList(Block(WIDTH) for _ in range(3))
        self.leave = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for layer in self.layers:
            x = layer(x)
        return self.leave(x)


def features(run: Run, step: int) -> Tensor:
    return torch.sin(run.batch(step)[0].float())


@steps
def penalty_on_inputs(run: Run, step: int) -> None:
    """As WGAN-GP has it."""
    x = features(run, step).requires_grad_()
    y = run.model(x)
    (grad,) = torch.autograd.grad(y.float().sum(), x, create_graph=True)
    (y.float().mean() + (grad.norm(dim=1) - 1).square().mean()).backward()


@steps
def gradients_of_inputs(run: Run, step: int) -> Tensor:
    x = features(run, step).requires_grad_()
    run.model(x).float().square().mean().backward()
    return x.grad


# ---- outputs ----------------------------------------------------------------------------------------------------


@dataclass
class Output:
    """What a model may return."""

    logits: Tensor
    hidden: list[Tensor]
    extra: Mapping[str, Any]


class Structured(Net):
    """Returns a structure of its own choice, and its blocks give and take structures."""

    class Part(Block):
        def forward(self, pair: tuple[Tensor, dict[str, Tensor]]) -> tuple[Tensor, dict[str, Tensor]]:
            x, seen = pair
            x = super().forward(x)
            return x, {**seen, f"h{len(seen)}": x}

    def __init__(self, make: Callable[..., Any] = Output) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Part(WIDTH) for _ in range(3))
        self.make = make

    def forward(self, tokens: Tensor) -> Any:
        pair: Any = (self.embed(tokens), {})
        for layer in self.layers:
            pair = layer(pair)
        x, seen = pair
        return self.make(logits=self.head(self.norm(x)), hidden=list(seen.values()), extra={"n": 3, "none": None})


def model_output(**parts: Any) -> Any:
    from transformers.modeling_outputs import CausalLMOutput

    return CausalLMOutput(logits=parts["logits"], hidden_states=tuple(parts["hidden"]))


def as_tuple(**parts: Any) -> tuple[Any, ...]:
    return tuple(parts.values())


def leaves(tree: Any) -> list[Tensor]:
    """Every tensor of a structure, in its order."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, Output):
        tree = vars(tree)
    if isinstance(tree, Mapping):
        tree = list(tree.values())
    return [leaf for item in tree for leaf in leaves(item)] if isinstance(tree, list | tuple) else []


@steps
def all_outputs(run: Run, step: int) -> None:
    sum(out.float().square().mean() for out in leaves(run.model(run.batch(step)[0]))).backward()


@steps
def one_output(run: Run, step: int) -> None:
    leaves(run.model(run.batch(step)[0]))[1].float().square().mean().backward()


class Detached(Net):
    """Blocks trained by losses of their own: what goes on to the next is detached."""

    def forward(self, tokens: Tensor) -> Tensor:
        x, losses = self.embed(tokens), []
        for layer in self.layers:
            y = layer(x)
            losses.append(y.float().square().mean())
            x = y.detach()
        return self.head(self.norm(x)).float().abs().mean() + sum(losses)


@steps
def own_loss(run: Run, step: int) -> None:
    run.model(run.batch(step)[0]).backward()


@steps
def kept_outputs(run: Run, step: int) -> list[Tensor]:
    """Outputs, and detached views of weights, kept over the step."""
    run.kept = [*getattr(run, "kept", []), run.model(run.batch(step)[0]).detach()]
    token_loss(run.model, run.batch(step)).backward()
    return [kept.clone() for kept in run.kept]


# ---- functions --------------------------------------------------------------------------------------------------


class Custom(Net):
    """A custom autograd function that saves a weight and keeps another as an attribute."""

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor, other: Tensor) -> Tensor:
            ctx.save_for_backward(x, weight)
            ctx.other = other
            return x * weight + other

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            x, weight = ctx.saved_tensors
            return grad * weight, (grad * x).sum((0, 1)), (grad * ctx.other.sign()).sum((0, 1))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = self.Scaled.apply(layer(x), layer.norm.weight, layer.norm.bias)
        return self.head(self.norm(x))


class InPlace(Net):
    """Activations changed in place."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x).mul_(0.5).relu_()
        return self.head(self.norm(x))


@steps
def functional_grad(run: Run, step: int) -> None:
    """torch.func.grad by all parameters, whose result becomes .grad."""
    params = dict(run.model.named_parameters())
    inputs, targets = run.batch(step)

    def loss(values: dict[str, Tensor]) -> Tensor:
        logits = torch.func.functional_call(run.model, values, (inputs,))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    for name, grad in torch.func.grad(loss)({name: p.detach() for name, p in params.items()}).items():
        params[name].grad = grad


@steps
def functional_call(run: Run, step: int) -> None:
    """The model called with its own parameters, through torch.func."""
    params = dict(run.model.named_parameters())
    logits = torch.func.functional_call(run.model, params, (run.batch(step)[0],))
    logits.float().square().mean().backward()


@steps
def jvp_and_vmap(run: Run, step: int) -> list[Tensor]:
    """Forward-mode derivatives and vmap of a block, between steps."""
    x = torch.sin(torch.arange(2.0 * WIDTH)).view(2, WIDTH).to(run.model.layers[0].up.weight.dtype)
    token_loss(run.model, run.batch(step)).backward()
    with torch.no_grad():
        return [*torch.func.jvp(run.model.layers[0], (x,), (x,)), torch.vmap(run.model.layers[1])(x)]


@steps
def per_sample(run: Run, step: int) -> Tensor:
    """Gradients of each sample by the inputs: vmap over grad."""
    token_loss(run.model, run.batch(step)).backward()
    x = torch.sin(torch.arange(3.0 * WIDTH)).view(3, WIDTH).to(run.model.layers[0].up.weight.dtype)
    return torch.vmap(torch.func.grad(lambda row: run.model.layers[0](row).float().sum()))(x)


# ---- looking on -------------------------------------------------------------------------------------------------


@steps
def module_hooks(run: Run, step: int) -> list[float]:
    """Each kind of module hook, reading the module's weight."""
    seen: list[float] = []
    block = run.model.layers[1]

    def look(module: nn.Module, *_: Any) -> None:
        seen.append(module.up.weight.detach().float().sum().item())

    handles = [
        block.register_forward_pre_hook(look),
        block.register_forward_hook(look),
        block.register_full_backward_pre_hook(look),
        block.register_full_backward_hook(look),
    ]
    token_loss(run.model, run.batch(step)).backward()
    for handle in handles:
        handle.remove()
    return seen


@steps
def hooks_that_change(run: Run, step: int) -> None:
    """Module hooks that exchange inputs, outputs and gradients."""
    block = run.model.layers[1]
    handles = [
        block.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,)),
        block.register_forward_hook(lambda module, args, output: output + args[0]),
        block.register_full_backward_hook(lambda module, grads, outs: (grads[0] * 2.0,)),
    ]
    token_loss(run.model, run.batch(step)).backward()
    for handle in handles:
        handle.remove()


@steps
def parameter_hooks(run: Run, step: int) -> list[float]:
    """Hooks on parameters: one that changes the gradient, and one that sees it accumulated."""
    seen: list[float] = []
    weight, bias = run.model.layers[1].up.weight, run.model.layers[0].down.bias
    handles = [
        weight.register_hook(lambda grad: grad * 0.5),
        bias.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3)),
        weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.float().abs().sum().item())),
        bias.register_post_accumulate_grad_hook(lambda p: seen.append(p.detach().float().abs().sum().item())),
    ]
    token_loss(run.model, run.batch(step)).backward()
    for handle in handles:
        handle.remove()
    return seen


@steps
def tensor_hooks(run: Run, step: int) -> list[Tensor]:
    """Hooks on activations, and gradients that they retain."""
    seen: list[Tensor] = []
    kept: list[Tensor] = []

    def keep(module: nn.Module, args: Any, output: Tensor) -> None:
        output.register_hook(lambda grad: seen.append(grad.clone()))
        output.retain_grad()
        kept.append(output)

    handles = [layer.register_forward_hook(keep) for layer in run.model.layers]
    token_loss(run.model, run.batch(step)).backward()
    for handle in handles:
        handle.remove()
    return [*seen, *(output.grad for output in kept)]


@steps
def saved_tensor_hooks(run: Run, step: int) -> None:
    """What autograd saves is packed by the user: here to the CPU, and by a function."""
    with torch.autograd.graph.save_on_cpu():
        first = token_loss(run.model, run.batch(step))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t.clone()):
        second = token_loss(run.model, run.batch(step + 5))
    (first + second).backward()


@steps
def anomaly_mode(run: Run, step: int) -> None:
    with torch.autograd.detect_anomaly():
        token_loss(run.model, run.batch(step)).backward()


@steps
def autocast(run: Run, step: int) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        logits = run.model(run.batch(step)[0])
    logits.float().square().mean().backward()


# ---- exceptions -------------------------------------------------------------------------------------------------


def _raise(*_: Any) -> None:
    raise ZeroDivisionError


@steps
def failed_forward(run: Run, step: int) -> None:
    handle = run.model.layers[1].register_forward_pre_hook(_raise)
    with pytest.raises(ZeroDivisionError):
        run.model(run.batch(step)[0])
    handle.remove()
    token_loss(run.model, run.batch(step)).backward()


@steps
def failed_backward(run: Run, step: int) -> None:
    """A backward fails half-way; its gradients are dropped, and a graph made before goes on."""
    loss = token_loss(run.model, run.batch(step))
    hooked = run.model.layers[1].register_full_backward_hook(_raise)
    broken = token_loss(run.model, run.batch(step))
    with pytest.raises(ZeroDivisionError):
        broken.backward()
    hooked.remove()
    run.optimizer.zero_grad()
    loss.backward()


@steps
def failed_backward_kept(run: Run, step: int) -> None:
    """What a backward that fails half-way has left stays, as in torch."""
    hooked = run.model.layers[1].register_full_backward_hook(_raise)
    broken = token_loss(run.model, run.batch(step))
    with pytest.raises(ZeroDivisionError):
        broken.backward()
    hooked.remove()
    token_loss(run.model, run.batch(step)).backward()


# ---- torch.compile ----------------------------------------------------------------------------------------------


def compiled(what: str, backend: str) -> Callable[[Run], Any]:
    """Train the model compiled as a whole, or its blocks."""

    def program(run: Run) -> list[Tensor]:
        torch._dynamo.reset()
        model = torch.compile(run.model, backend=backend) if what == "whole" else run.model
        for layer in run.model.layers if what == "blocks" else ():
            layer.compile(backend=backend)
        losses = []
        for step in range(2):
            loss = token_loss(model, run.batch(step))
            loss.backward()
            losses.append(loss.detach())
            run.update()
        return losses

    return program


CASES = [
    Case("retain_graph", retain_graph, backwards=2),
    Case("two losses of one forward, two backwards", two_losses, backwards=2),
    Case("one backward of two losses", several_tensors),
    Case("two forwards, one backward", two_forwards),
    Case("two graphs, backwards in the other order", graph_of_the_last_step, backwards=2),
    Case("backward(inputs=...)", some_inputs),
    Case("autograd.grad", gradients_by_grad),
    Case("gradients set by hand", gradients_by_hand),
    Case("gradient penalty", gradient_penalty),
    Case("backward(create_graph=True)", create_graph),
    Case("gradient penalty on inputs", penalty_on_inputs, build=Features),
    Case("inputs that require grad", gradients_of_inputs, build=Features),
    *(
        Case(f"{name} checkpoint{what}", program, build=checkpointed(how), backwards=backwards)
        for name, how in (("reentrant", reentrant), ("non-reentrant", non_reentrant), ("nested", nested))
        for what, program, backwards in (
            ("", plain, 1),
            (", retain_graph", retain_graph, 2),
            (", two forwards", two_forwards, 2),
            (", weights in the loss", weights_in_loss, 2),
        )
        if (how, program) != (reentrant, retain_graph)  # torch itself refuses it
    ),
    Case("nested reentrant checkpoints", plain, build=checkpointed(nested_reentrant), backwards=2),
    Case("non-reentrant checkpoint, autograd.grad", gradients_by_grad, build=checkpointed(non_reentrant)),
    Case("non-reentrant checkpoint, gradient penalty", gradient_penalty, build=checkpointed(non_reentrant)),
    Case("checkpoint inside a unit", build=InsideCheckpoint),
    Case("checkpoint inside a unit, two forwards", two_forwards, build=InsideCheckpoint),
    Case("checkpoint inside a unit, weights in the loss", weights_in_loss, build=InsideCheckpoint),
    Case("reentrant checkpoint inside a unit", build=InsideReentrant),
    Case("two blocks a checkpoint", build=TwoAtOnce, spare=1),
    Case("all blocks under a checkpoint", build=Whole, spare=2),
    Case("checkpoint_sequential", build=Segments, spare=1),
    Case("outputs as a tuple", all_outputs, build=lambda: Structured(as_tuple)),
    Case("outputs as a dict", all_outputs, build=lambda: Structured(dict)),
    Case("outputs as a dataclass", all_outputs, build=Structured),
    Case("outputs as a ModelOutput", all_outputs, build=lambda: Structured(model_output)),
    Case("only one of the outputs in the loss", one_output, build=Structured),
    Case("detached between blocks", own_loss, build=Detached),
    Case("outputs kept over the step", kept_outputs),
    Case("custom autograd function", build=Custom),
    Case("activations changed in place", build=InPlace),
    Case("torch.func.grad by all parameters", functional_grad, settings={"gpu_param_memory_budget": 1 << 20}),
    Case(
        "torch.func.grad by all parameters, beyond the budget",
        functional_grad,
        settings={"gpu_param_memory_budget": 96 << 10},
        refused=r"gpu_param_memory_budget=98,304 bytes has no room for unit 'layers.\d' .* held by views",
    ),
    Case("torch.func.functional_call", functional_call),
    Case(
        "torch.func.jvp and vmap", jvp_and_vmap, ranks=(1,)
    ),  # torch has one forward AD level a process: not for ranks that are threads
    Case("per-sample gradients by vmap", per_sample, settings={"gpu_param_memory_budget": 1 << 20}),
    Case(
        "per-sample gradients by vmap, beyond the budget",
        per_sample,
        settings={"gpu_param_memory_budget": 96 << 10},
        refused="torch.func.grad and vjp allow no saved-tensor hooks, .* gpu_param_memory_budget until they are",
    ),
    Case("module hooks", module_hooks),
    Case("module hooks that change what they see", hooks_that_change),
    Case("parameter hooks", parameter_hooks),
    Case("tensor hooks, retain_grad", tensor_hooks),
    Case("saved-tensor hooks of one's own", saved_tensor_hooks),
    Case("anomaly mode", anomaly_mode),
    Case("autocast", autocast),
    Case("exception in forward", failed_forward),
    Case("exception in backward, dropped", failed_backward, backwards=2),
    Case("exception in backward, kept", failed_backward_kept, backwards=2),
    Case("torch.compile of the model", compiled("whole", "aot_eager"), once=True, thorough=True),
    Case("torch.compile of blocks", compiled("blocks", "aot_eager"), once=True),
    Case("torch.compile of blocks, inductor", compiled("blocks", "inductor"), once=True, thorough=True, tolerance=1e-6),
]


@pytest.mark.spread(22, second=80)
def test_trains_as_unsharded(case: Case, setting: Setting, check: Callable[[Case, Setting], None]) -> None:
    check(case, setting)
