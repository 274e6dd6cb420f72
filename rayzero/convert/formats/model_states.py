"""What DeepSpeed's ``*_model_states.pt`` say: which parameters the optimizer has, and the values of everything else.

A state dict's entries are in different places. Of what the optimizer trains, ``param_shapes`` has names and shapes in
the order of the flat partitions, and the optimizer's files have the values. Frozen parameters are in
``frozen_param_fragments`` in stages 2 and 3, by rank in stage 3. Buffers, other parameters and, in stage 1, frozen ones
are in ``module`` alone, which has all names. In stage 3 ``module`` has no values of parameters: each is empty.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rayzero.checkpoint.tensor_file import is_shape
from rayzero.convert.formats.content import Content, OptimizerGroup, Param, WeightDecl, listed, step_count
from rayzero.convert.formats.pickles import require_dense
from rayzero.errors import CheckpointError, UnsupportedError
from rayzero.layout.model_layout import dtype_name

Shapes = Mapping[str, tuple[int, ...]]  # of one group's parameters, in their order

_OWN = frozenset(  # DeepSpeed's own keys; "lr_scheduler" and others are there without a value, too
    (
        "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
        "frozen_param_fragments", "skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size",
        "checkpoint_parallel_dimensions", "sparse_tensor_module_names", "num_experts", "ds_config", "ds_version",
        "universal_checkpoint_info",
    )
)  # fmt: skip


class ModelStates:
    """The state dict of a folder, without the values that its optimizer has."""

    def __init__(self, files: Sequence[Any], *, sharded: bool, everything: bool = True) -> None:
        """files: by rank, what each ``*_model_states.pt`` holds. sharded: ranks have parts of parameters (stage 3).
        everything: False leaves out what is no tensor.

        Raises UnsupportedError that names parameters whose values are in no file, and entries that are no tensors;
        CheckpointError, LookupError, TypeError or ValueError if the files do not fit each other."""
        self._first = as_dict(files[0])
        self.groups: list[Shapes] = [_shapes(group) for group in self._first.get("param_shapes") or []]
        self.optimized = {name: shape for group in self.groups for name, shape in group.items()}
        if sum(map(len, self.groups)) != len(self.optimized):
            raise CheckpointError("a parameter is in two groups of its param_shapes")
        self._pieces: dict[str, list[Tensor]] = {}  # parameter or buffer -> its values, one after another
        self.params: dict[str, Param] = {}  # those that no optimizer has
        self.buffers: dict[str, WeightDecl] = {}
        self.tied: dict[str, str] = {}
        self.left_out: tuple[str, ...] = ()  # entries of the module that are no tensors, and what the loop saved
        self._take_frozen(files if sharded else files[:1])
        self._take_module(sharded, everything)

    @property
    def steps(self) -> int:
        """Optimizer steps of the run, those included that an overflow of fp16 skipped."""
        return step_count(self._first.get("global_steps", 0), "global_steps")

    @property
    def updates(self) -> int:
        """Steps that changed the parameters."""
        return self.steps - step_count(self._first.get("skipped_steps") or 0, "skipped_steps")

    @property
    def round_robin(self) -> bool:
        """Whether gradients were partitioned in an order of their own."""
        return bool(self._zero.get("round_robin_gradients"))

    @property
    def stage(self) -> int:
        return step_count(self._zero.get("stage", 0), "stage")

    @property
    def _zero(self) -> dict[Any, Any]:
        return as_dict(as_dict(self._first.get("ds_config") or {}).get("zero_optimization") or {})

    def value(self, name: str) -> Tensor:
        """A whole parameter that ``params`` has, in its shape."""
        shape = self.params[name].decl.shape
        return self.read(name, 0, math.prod(shape)).view(shape)

    def rounded(self, name: str) -> Tensor | None:
        """The model's own value of a parameter that the optimizer trains; None if it is in no file (stage 3)."""
        value = as_dict(self._first.get("module") or {}).get(name)
        return value if isinstance(value, Tensor) and tuple(value.shape) == self.optimized[name] else None

    def __contains__(self, name: str) -> bool:
        return name in self._pieces or name in self.tied

    def content(self, params: Mapping[str, Param], groups: tuple[OptimizerGroup, ...], step: int) -> Content:
        """What the folder holds. params: all of them, with what the optimizer's files say."""
        return Content(
            params=params, buffers=self.buffers, tied=self.tied, groups=groups, step=step, left_out=self.left_out
        )

    def _take_frozen(self, files: Sequence[Any]) -> None:
        for name, shape in _shapes(self._first.get("frozen_param_shapes") or {}).items():
            pieces = [require_dense(as_dict(file)["frozen_param_fragments"][name], name).reshape(-1) for file in files]
            if (held := sum(map(len, pieces))) < math.prod(shape):
                raise CheckpointError(
                    f"the frozen parameter {name!r} has {held:,} elements, but its shape {shape}; a *_model_states.pt "
                    "is missing or of another checkpoint"
                )
            self._pieces[name] = pieces
            self.params[name] = Param(decl=WeightDecl(shape, dtype_name(pieces[0].dtype)), trained=False)

    def _take(self, name: str, value: Any) -> WeightDecl:
        """Take a whole tensor of ``module``."""
        self._pieces[name] = [require_dense(value, name).reshape(-1)]
        return WeightDecl.of(value)

    def _take_module(self, sharded: bool, everything: bool) -> None:
        """What ``module`` has beyond the parameters that are known by now."""
        module = as_dict(self._first.get("module") or {})  # a pipeline's is None
        buffers = self._first.get("buffer_names") or []
        if not isinstance(buffers, list):
            raise TypeError(f"buffer_names is {type(buffers).__name__}")
        self.buffers = {name: self._take(name, module[name]) for name in buffers}
        known = self.optimized.keys() | self._pieces.keys()
        shared = as_dict(self._first.get("shared_params") or {})
        if not all(isinstance(name, str) for name in shared.values()):
            raise TypeError("shared_params names no parameters")
        owners = _owners(module) | shared
        # without a list of frozen parameters, nobody can tell those that got gradients
        says_frozen = self._first.get("frozen_param_shapes") is not None
        missing, others = [], []
        for name, value in module.items():
            owner = owners.get(name, name)
            if name in known:
                continue
            if owner in self.buffers:
                self.buffers[name], self._pieces[name] = self.buffers[owner], self._pieces[owner]
            elif owner in self.optimized or owner in self.params:
                self.tied[name] = owner
            elif not isinstance(value, Tensor):
                others.append(name)
            elif sharded and tuple(value.shape) == (0,):
                missing.append(name)
            else:
                self.params[name] = Param(
                    decl=self._take(name, value), trained=says_frozen and value.is_floating_point()
                )
        for name, owner in shared.items():
            if name not in module and name not in known and (owner in self.optimized or owner in self.params):
                self.tied[name] = owner
        _require_values(missing, others if everything else [])
        saved = (str(key) for key, value in self._first.items() if key not in _OWN and value is not None)
        self.left_out = tuple(sorted([*others, *saved]))

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Elements of a parameter that no optimizer has, or of a buffer; 1D."""
        return range_of(self._pieces[name], start, stop)


def _owners(module: Mapping[str, Any]) -> dict[str, str]:
    """Other names -> the name that has the values. DeepSpeed lists parameters with several names, but not modules with
    several: their entries share memory, in stage 3 that of an empty tensor."""
    first: dict[tuple[int, int, tuple[int, ...]], str] = {}
    found: dict[str, str] = {}
    for name, value in module.items():
        if isinstance(value, Tensor) and value.layout is torch.strided:
            place = (value.untyped_storage()._cdata, int(value.storage_offset()), tuple(value.shape))
            if (owner := first.setdefault(place, name)) != name:
                found[name] = owner
    return found


def _require_values(missing: Sequence[str], others: Sequence[str]) -> None:
    if missing:
        raise UnsupportedError(
            f"it has no values of {listed(missing)}: ZeRO-3 saves no parameter that gets gradients and is in no "
            "optimizer, and with exclude_frozen_parameters none that is frozen; add them to the optimizer, or freeze "
            "them before deepspeed.initialize, and save without exclude_frozen_parameters"
        )
    if others:
        raise UnsupportedError(
            f"it has {listed(others)} in its state dict, which is no tensor, and no other format could hold it; "
            "convert the weights alone (--weights-only)"
        )


def groups_from(given: Any, shapes: Sequence[Shapes]) -> tuple[OptimizerGroup, ...]:
    """An optimizer's groups by names. given: its ``param_groups``, of numbers of flattened groups; shapes: of these."""
    return tuple(
        OptimizerGroup.of((name for index in group["params"] for name in shapes[index]), group, ("params", "step"))
        for group in given
    )


def updates_of(inner: Mapping[str, Any], group: int) -> int | None:
    """The step count of a flattened group in the state dict of DeepSpeed's inner optimizer: in its states, else in its
    parameter group; None if it is in neither."""
    found = inner["state"].get(group, {}).get("step")
    if found is None:
        found = next((g.get("step") for g in inner["param_groups"] if group in g["params"]), None)
    return None if found is None else step_count(found, "step")


def overlaps(sizes: Iterable[int], start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """The range [start, stop) of a vector that is cut into pieces of these sizes: (piece, start, stop) of each part."""
    begin = 0
    for piece, size in enumerate(sizes):
        low, high = max(start, begin), min(stop, begin + size)
        if low < high:
            yield piece, low - begin, high - begin
        begin += size


def range_of(pieces: Sequence[Tensor], start: int, stop: int) -> Tensor:
    """Elements of the concatenation of 1D tensors; a view if they are in one."""
    parts = [pieces[piece][low:high] for piece, low, high in overlaps(map(len, pieces), start, stop)]
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.float32, device="cpu")


def as_dict(value: Any) -> dict[Any, Any]:
    """``value``, if it is a dict. Raises TypeError otherwise."""
    if not isinstance(value, dict):
        raise TypeError(f"{type(value).__name__} where an object belongs")
    return value


def _shapes(group: Any) -> Shapes:
    shapes = {}
    for name, shape in as_dict(group).items():
        if not isinstance(name, str) or not is_shape(list(shape)):
            raise ValueError(f"{name!r} has the shape {str(shape)[:80]}")
        shapes[name] = tuple(shape)
    return shapes
