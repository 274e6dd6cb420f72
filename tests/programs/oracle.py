"""Unsharded training on R replicas whose gradients are averaged at each step: what every engine must equal.

Each replica runs the program with plain torch in a thread of its own, one at a time: a replica runs until it reaches
``optimizer.step()`` (or a clip), then the next one runs. Torch's generator is each replica's own while it runs.

What the nth backwards bring is added over replicas first, then backward by backward, in fp32. In bf16 the model's
parameters are bf16 and the optimizer holds fp32 masters, and a step rounds the masters into the parameters. Elements of
parameters that the program writes are taken over by their masters. Frozen parameters that bf16 rounds compute in bf16
too, and end with the values they had before.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import zip_longest
from operator import add
from typing import Any

import torch
from engine.models import seeded
from torch import Tensor, nn

from .case import Case, Run

Outcome = tuple[dict[str, Tensor], Any]  # of one rank: the final state, and what its program returned


@functools.lru_cache(maxsize=16)
def oracle(case: Case, world_size: int, precision: str, *, adds_up: bool = False) -> list[Outcome]:
    """What each rank must end with. ``adds_up``: each adds up by itself what its backwards bring."""
    meeting = _Meeting(world_size)
    replicas = [_Replica(case, rank, meeting, precision, adds_up) for rank in range(world_size)]
    outcomes: list[Any] = [None] * world_size

    def run(rank: int) -> None:
        with meeting.taking_turns(rank):
            outcomes[rank] = replicas[rank].train()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world_size)]
    state = torch.get_rng_state()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.set_rng_state(state)
    meeting.raise_failure()
    return outcomes


class _Meeting:
    """Lets replicas run one at a time, and averages their gradients once all have come."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._turn = 0
        self._changed = threading.Condition()
        self._brought: list[list[list[Tensor]]] = []
        self._average: list[Tensor | None] = []
        self._failure: BaseException | None = None

    def taking_turns(self, rank: int) -> _Turn:
        return _Turn(self, rank)

    def average(self, rank: int, grads: list[list[Tensor]]) -> list[Tensor | None]:
        """Bring one's gradients, of each parameter those of each backward; returns the mean over all replicas."""
        self._brought.append([[each.detach().clone() for each in rounds] for rounds in grads])
        if len(self._brought) == self._world_size:
            self._average = [in_rounds(each) for each in zip(*self._brought, strict=True)]
            self._brought = []
        mine = torch.get_rng_state()
        self.hand_over(rank)
        self.wait(rank)
        torch.set_rng_state(mine)
        return [None if grad is None else grad.clone() for grad in self._average]

    def hand_over(self, rank: int) -> None:
        with self._changed:
            self._turn = (rank + 1) % self._world_size
            self._changed.notify_all()

    def wait(self, rank: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._turn == rank or self._failure is not None)
        self.raise_failure()

    def fail(self, failure: BaseException) -> None:
        with self._changed:
            self._failure = self._failure or failure
            self._changed.notify_all()

    def raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


def in_rounds(replicas: Sequence[Sequence[Tensor]]) -> Tensor | None:
    """The mean over replicas of what backwards have brought of one parameter."""
    sums = [functools.reduce(add, there) for there in map(_there, zip_longest(*replicas))]
    return functools.reduce(add, sums) * (1 / len(replicas)) if sums else None


def _there(grads: Iterable[Tensor | None]) -> list[Tensor]:
    return [grad.float() for grad in grads if grad is not None]


class _Turn:
    """A replica's whole run: it waits for its first turn, and hands over at its end."""

    def __init__(self, meeting: _Meeting, rank: int) -> None:
        self._meeting = meeting
        self._rank = rank

    def __enter__(self) -> None:
        self._meeting.wait(self._rank)

    def __exit__(self, kind: Any, failure: BaseException | None, trace: Any) -> bool:
        if failure is not None:
            self._meeting.fail(failure)
        self._meeting.hand_over(self._rank)
        return True


class _Replica:
    """One of a rank's plain models and its optimizer; ``optimizer.step()`` averages over the replicas first."""

    def __init__(
        self,
        case: Case,
        rank: int,
        meeting: _Meeting,
        precision: str,
        adds_up: bool,
        build: Callable[[], nn.Module] | None = None,
    ) -> None:
        """``adds_up``: see ``oracle``. ``build``: of a further model; None: the case's own."""
        self._adds_up = adds_up
        self._case = case
        self._rank = rank
        self._meeting = meeting
        self._averaged = False  # whether the gradients are those of all replicas already (after a clip)
        self._masters: dict[nn.Parameter, nn.Parameter] = {}
        self._frozen: dict[nn.Parameter, Tensor] = {}  # bf16: fp32 values of what is not trained
        self._rounds: dict[nn.Parameter, list[Tensor]] = {}  # what backwards brought, one after the other
        self._nodes: list[Any] = []  # held, else autograd makes new ones without our hooks
        self.model = seeded(build or case.build)
        self._others = (
            [] if build else [_Replica(case, rank, meeting, precision, adds_up, other) for other in case.others]
        )
        self.optimizer = case.optimizer(self.model)
        if precision == "bf16":
            self._to_bf16()
        else:
            _convert(self.model, torch.float32)
            self._take_each([p for p in self.model.parameters() if p.requires_grad] if case.backwards > 1 else [])
        self.optimizer.register_step_pre_hook(lambda *_: self._gather())
        self.optimizer.register_step_post_hook(lambda *_: self._publish())
        self._zero_grad = self.optimizer.zero_grad
        self.optimizer.zero_grad = self._discard  # type: ignore[method-assign]

    @property
    def _params(self) -> list[nn.Parameter]:
        """Those of the optimizer, groups that the program has added included."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def train(self) -> Outcome:
        if self._case.draws:
            torch.manual_seed(self._rank)
        seen = self._case.program(self.run())
        return self._state(), seen

    def run(self) -> Run:
        """What the program is given of this model."""
        return Run(
            engine="torch",
            rank=self._rank,
            world_size=self._meeting._world_size,
            model=self.model,
            optimizer=self.optimizer,
            clip=self._clip,
            clip_value=self._clip_value,
            full_parameters=lambda modify=False: nullcontext(),
            full_state=self._state,
            others=tuple(other.run() for other in self._others),
        )

    def _clip(self, max_norm: float) -> Tensor:
        self._gather()
        self._averaged = True
        return nn.utils.clip_grad_norm_(self._params, max_norm).float()

    def _clip_value(self, limit: float) -> None:
        self._gather()
        self._averaged = True
        nn.utils.clip_grad_value_(self._params, limit)

    def _gather(self) -> None:
        """Have the average over all replicas on the optimizer's parameters."""
        self._take_writes()
        if self._averaged:
            return
        of = {master: param for param, master in self._masters.items()}
        params = [of.get(param, param) for param in self._params]
        for param in params:
            self._add(param)
        mean = self._meeting.average(self._rank, [self._rounds.pop(param, []) for param in params])
        for param, grad in zip(self._params, mean, strict=True):
            param.grad = None if grad is None else grad.to(param.dtype)

    def _publish(self) -> None:
        self._averaged = False
        with torch.no_grad():
            for param, master in self._masters.items():
                param.copy_(master)

    def _discard(self, set_to_none: bool = True) -> None:
        self._averaged = False
        for param in () if set_to_none or self._masters else self._rounds:
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
        self._rounds.clear()
        for param in self.model.parameters() if set_to_none else self._masters:
            param.grad = None
        self._zero_grad(set_to_none)

    def _state(self) -> dict[str, Tensor]:
        self._take_writes()
        full = {id(param): exact for param, exact in (self._masters | self._frozen).items()}
        state = self.model.state_dict(keep_vars=True)
        return {name: full.get(id(value), value).detach().clone() for name, value in state.items()}

    # ---- bf16

    def _to_bf16(self) -> None:
        given = {param: param.detach().clone() for param in self.model.parameters()}
        self._masters = {p: nn.Parameter(value.float()) for p, value in given.items() if p.requires_grad}
        patterns = self._case.settings.get("keep_fp32", ())
        _convert(self.model, torch.bfloat16, patterns)
        for param, value in given.items():
            if not param.requires_grad and torch.promote_types(value.dtype, param.dtype) is not param.dtype:
                self._frozen[param] = value.float()
        for group in self.optimizer.param_groups:
            group["params"] = [self._masters[p] for p in group["params"] if p in self._masters]
        self._take_each(self._masters)
        self.model.register_forward_pre_hook(_Cast(torch.bfloat16), with_kwargs=True)
        for module in self.model.modules() if patterns else ():
            dtypes = {p.dtype for p in module.parameters(recurse=False)}
            if len(dtypes) == 1:
                module.register_forward_pre_hook(_Cast(dtypes.pop()), with_kwargs=True)

    def _take_writes(self) -> None:
        """What the program wrote into parameters goes to their masters; other elements keep their precision."""
        with torch.no_grad():
            for param, exact in (self._masters | self._frozen).items():
                exact.copy_(torch.where(param == exact.to(param.dtype), exact, param.float()))

    # ---- what each backward brings

    def _take_each(self, params: Iterable[nn.Parameter]) -> None:
        for param in params:
            self._nodes.append(_after_accumulate(param, functools.partial(self._add, param)))

    def _add(self, param: nn.Parameter) -> None:
        if param.grad is not None:
            rounds, grad, param.grad = self._rounds.setdefault(param, []), param.grad.detach(), None
            if rounds and self._adds_up:
                rounds[0] = rounds[0].float() + grad.float()
            else:
                rounds.append(grad)


def _after_accumulate(param: nn.Parameter, act: Callable[[], None]) -> Any:
    """Call ``act`` after a backward has accumulated into ``param.grad``, and after the user's own hooks saw it."""
    node = torch.autograd.graph.get_gradient_edge(param).node
    node.register_hook(lambda *_: act())
    return node


def _convert(model: nn.Module, dtype: torch.dtype, kept: Iterable[str] = ()) -> None:
    """Give the parameters their compute dtype; those of modules that match ``kept`` stay in fp32."""
    patterns = list(kept)
    in_fp32 = {
        id(param)
        for name, module in model.named_modules()
        if any(fnmatchcase(name, pattern) for pattern in patterns)
        for param in module.parameters()
    }
    for param in model.parameters():
        wanted = torch.float32 if id(param) in in_fp32 else dtype
        if param.dtype is not wanted:
            param.data = param.data.to(wanted)


@dataclass(frozen=True)
class _Cast:
    """Casts a module's floating inputs. (An object, not a closure: models are pickled.)"""

    dtype: torch.dtype

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return self._cast(args), self._cast(kwargs)

    def _cast(self, tree: Any) -> Any:
        if isinstance(tree, Tensor):
            return tree.to(self.dtype) if tree.is_floating_point() else tree
        if type(tree) in (list, tuple):
            return type(tree)(self._cast(item) for item in tree)
        if type(tree) is dict:
            return {key: self._cast(item) for key, item in tree.items()}
        return tree
