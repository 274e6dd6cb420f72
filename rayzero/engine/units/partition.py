"""Cuts a model into units: which parameters are gathered and released together, and which module's forward needs them.

[Note: unit modules] A set of *unit modules* is chosen; a parameter belongs to the innermost unit module that
encloses it, else to the root unit. With ``units="auto"`` the unit modules are

1. the *blocks*: entries that own parameters of every outermost ``nn.ModuleList`` or ``nn.Sequential`` (lists
   inside a block do not split it; an entry without a forward, such as a ModuleList, is looked into), and
2. outside the blocks, every module that directly owns more than ``min_unit_bytes`` (embedding, head).

[Note: siblings] A unit has one dtype and is all trained or all frozen, so a unit module with mixed parameters
gets several units: ``layers.0``, ``layers.0:float32``, ``layers.0:frozen``, ``layers.0:frozen:float32``.

[Note: opaque] A dtype says what the bytes of a plain Parameter in floating point mean, and it may be converted. A
Parameter of another class may hold anything (4-bit codes in the bytes of a bfloat16), with the key to it among the
attributes of the object; integers and floats of 8 bits mean what the module does with them. Frozen, these are *opaque*:
they keep their dtype and every bit of it, in units of their own: ``layers.0:opaque:uint8``.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from rayzero.codecs import CODECS, codec_for
from rayzero.config.choices import CpuCompressionMethod
from rayzero.engine.private_torch import has_memory
from rayzero.errors import ConfigError, UnsupportedError
from rayzero.layout.model_layout import (
    ModelLayout,
    dtype_from_name,
    dtype_name,
    is_unit_dtype,
    lay_out_unit,
    loses_bits,
)
from rayzero.tensor_metadata import class_name, own_class

ROOT = ""  # the model itself, as named_modules() names it

_NUMBERS = {torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.complex128}

UnitRule = str | Sequence[str] | Callable[[str, nn.Module], bool]


@dataclass(frozen=True, kw_only=True)
class UnitPlan:
    """A model's layout, and the module whose forward needs each unit.

    Knows names only; not the modules or parameters behind them (``model.get_submodule``, ``get_parameter``)."""

    layout: ModelLayout
    modules: tuple[str, ...]  # per unit: the module whose forward needs it; "" is the model itself
    units_of_module: Mapping[str, tuple[int, ...]]
    """Per unit module: every unit its forward needs, its own first, then those that own parameters tied into it."""

    @property
    def root(self) -> list[int]:
        """Units of parameters outside any unit module."""
        return [unit for unit, module in enumerate(self.modules) if module == ROOT]


def build_layout(
    model: nn.Module,
    *,
    units: UnitRule = "auto",
    min_unit_bytes: int = 1 << 20,
    shard_bytes: int = 8 << 20,
    compute_dtype: torch.dtype = torch.float32,
    keep_fp32: Sequence[str] = (),
    frozen_codec: str = "none",
    whole_parameters: bool = False,
) -> UnitPlan:
    """Lay out every parameter of ``model`` once, in units: root first, then in registration order.

    units: ``"auto"``, names of module classes, or a function (name, module) that says which modules are unit
        modules. [Note: unit modules]
    min_unit_bytes: in the unit's dtype, for ``"auto"``.
    shard_bytes: bytes of fp32 master in a shard, a multiple of 256.
    compute_dtype: dtype of units, except modules whose name, or an enclosing module's, matches ``keep_fp32``.
    frozen_codec: how owners keep the published parameters of frozen units whose dtype it takes (codecs/). Unless it
        loses bits, frozen parameters whose values the units' dtype does not hold exactly are units of their own, of
        which owners keep fp32 masters.
    whole_parameters: no shard cuts a trained parameter; ``shard_bytes`` is the most of one with several.

    A tied parameter is laid out under its first name. Raises UnsupportedError, naming the parameter, for complex,
    float64, sparse, lazy, expanded and overlapping ones, and for tensors around other tensors; ConfigError for
    settings that match nothing. [Note: opaque]
    """
    tree = _ModuleTree(model)
    found = _collect(model, tree, compute_dtype, keep_fp32, not CODECS[CpuCompressionMethod(frozen_codec)].lossy)
    _refuse_overlaps(found)
    unit_modules = _choose(tree, found, units, min_unit_bytes)
    groups = _group(tree, found, unit_modules)
    root = "<root>" if "root" in tree.by_name else "root"
    layout = ModelLayout(
        units=tuple(
            lay_out_unit(
                i,
                (module or root) + suffix,
                group[0].dtype,
                group[0].tensor.requires_grad,
                [(p.name, tuple(p.tensor.shape)) for p in group],
                frozen_master=group[0].frozen_master,
                codec=_codec(group[0], frozen_codec),
                opaque=group[0].opaque,
            )
            for i, ((module, suffix), group) in enumerate(groups.items())
        ),
        shard_numel=_shard_numel(shard_bytes),
        whole_parameters=whole_parameters,
    )
    modules = tuple(module for module, _ in groups)
    return UnitPlan(layout=layout, modules=modules, units_of_module=_units_of_module(tree, found, unit_modules, groups))


def _codec(one: _Found, frozen_codec: str) -> str:
    codec = codec_for(frozen_codec, one.dtype)
    return "none" if one.tensor.requires_grad or (one.opaque and codec.lossy) else codec.name


def _shard_numel(shard_bytes: int) -> int:
    if shard_bytes <= 0 or shard_bytes % 256:
        raise ConfigError(f"shard_bytes must be a positive multiple of 256 bytes, got {shard_bytes}")
    return shard_bytes // 4


# ---- the module tree --------------------------------------------------------------------------------------------


class _ModuleTree:
    """A model's modules by each of their names. A module that is registered twice goes by its first name."""

    def __init__(self, model: nn.Module) -> None:
        self.by_name = dict(model.named_modules(remove_duplicate=False))
        self._first = {id(module): name for name, module in reversed(self.by_name.items())}

    def enclosing(self, name: str) -> Iterator[str]:
        """First names of the module ``name`` and of every module around it on that path, innermost first, root last."""
        while name:
            yield self._first[id(self.by_name[name])]
            name = name.rpartition(".")[0]
        yield ROOT

    def innermost(self, name: str, chosen: Mapping[str, object]) -> str:
        """The innermost module around ``name`` that is in ``chosen``, else the root."""
        return next((outer for outer in self.enclosing(name) if outer in chosen), ROOT)

    def home(self, name: str) -> str:
        """The innermost module around ``name`` that has a forward of its own (a ParameterList has none)."""
        return next(outer for outer in self.enclosing(name) if outer == ROOT or _has_forward(self.by_name[outer]))

    def unique(self) -> Iterator[tuple[str, nn.Module]]:
        """Every module once, by its first name, in registration order."""
        return ((name, module) for name, module in self.by_name.items() if self._first[id(module)] == name)


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


# ---- the parameters ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """A parameter, its dtype in a unit, and the modules (by path) that hold it; the first one owns it."""

    name: str
    tensor: nn.Parameter
    dtype: torch.dtype
    kept: bool  # its dtype is not the compute dtype
    frozen_master: bool
    opaque: bool
    holders: tuple[str, ...]

    @property
    def suffix(self) -> str:
        if self.opaque:
            return f":opaque:{dtype_name(self.dtype)}"
        frozen = "" if self.tensor.requires_grad else ":frozen:master" if self.frozen_master else ":frozen"
        return frozen + (f":{dtype_name(self.dtype)}" if self.kept else "")

    @property
    def size_bytes(self) -> int:
        return self.tensor.numel() * self.dtype.itemsize


def _collect(
    model: nn.Module, tree: _ModuleTree, compute_dtype: torch.dtype, keep_fp32: Sequence[str], frozen_masters: bool
) -> list[_Found]:
    dtype_from_name(dtype_name(compute_dtype))
    _require_matches(tree, keep_fp32)
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    found = []
    for name, parameter in model.named_parameters():
        _refuse(name, parameter)
        holders = tuple(alias.rpartition(".")[0] for alias in names[id(parameter)])
        kept = any(fnmatchcase(module, pattern) for module in tree.enclosing(holders[0]) for pattern in keep_fp32)
        opaque = is_opaque(parameter)
        dtype = parameter.dtype if opaque else torch.float32 if kept else compute_dtype
        found.append(
            _Found(
                name=name,
                tensor=parameter,
                dtype=dtype,
                kept=dtype is not compute_dtype,
                frozen_master=frozen_masters
                and not parameter.requires_grad
                and not opaque
                and loses_bits(parameter.dtype, dtype),
                opaque=opaque,
                holders=holders,
            )
        )
    if not found:
        raise ConfigError(f"{type(model).__name__} has no parameters to train")
    return found


def _require_matches(tree: _ModuleTree, patterns: Sequence[str]) -> None:
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in tree.by_name):
            near = difflib.get_close_matches(pattern, tree.by_name, n=1)
            hint = f"; the nearest is {near[0]!r}" if near else ""
            raise ConfigError(f"keep_fp32 pattern {pattern!r} matches no module name of the model{hint}")


def is_opaque(parameter: nn.Parameter) -> bool:
    """Whether a Parameter's bytes need not be its values. [Note: opaque]"""
    return not parameter.requires_grad and (own_class(parameter) is not nn.Parameter or parameter.dtype not in _NUMBERS)


def _refuse(name: str, parameter: nn.Parameter) -> None:
    """Raise UnsupportedError for a parameter that cannot be laid out."""
    if is_lazy(parameter):
        raise UnsupportedError(f"parameter {name!r} is not initialized yet; run one forward of the lazy modules first")
    if parameter.layout != torch.strided:
        raise UnsupportedError(f"parameter {name!r} has layout {parameter.layout}; only dense parameters are supported")
    if not has_memory(parameter):
        raise UnsupportedError(
            f"parameter {name!r} is a {class_name(parameter)}, which wraps other tensors and has no memory that could "
            "be handed to the owners; leave it a plain Parameter (if frozen, cpu_compression='int8' or 'quantization' "
            "keeps it in as few bytes), or quantize with bitsandbytes"
        )
    if not is_unit_dtype(parameter.dtype, opaque=is_opaque(parameter)):
        instead = {True: "hold its real and imaginary parts as real parameters"}.get(parameter.is_complex())
        instead = instead or ("convert it to float32" if parameter.is_floating_point() else "make it a buffer")
        raise UnsupportedError(
            f"parameter {name!r} is {dtype_name(parameter.dtype)}, which is not supported; {instead}"
        )
    if any(size > 1 and stride == 0 for size, stride in zip(parameter.shape, parameter.stride(), strict=True)):
        raise UnsupportedError(f"parameter {name!r} is an expanded tensor: several elements share memory; clone it")


def _refuse_overlaps(found: Sequence[_Found]) -> None:
    """Raise UnsupportedError for two Parameters that share elements of memory without being the same object."""
    by_storage: dict[int, list[_Found]] = {}
    for one in found:
        address = one.tensor.untyped_storage().data_ptr()  # 0 for meta and empty tensors, which have no memory
        if address and one.tensor.numel():
            by_storage.setdefault(address, []).append(one)
    for sharing in by_storage.values():
        for i, first in enumerate(sharing):
            for second in sharing[i + 1 :]:
                if share_elements(first.tensor, second.tensor):
                    raise UnsupportedError(
                        f"parameters {first.name!r} and {second.name!r} overlap in memory but are two Parameters; "
                        "tie them by assigning one Parameter to both modules, or clone one"
                    )


def share_elements(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two dense tensors of one storage have a byte in common (exact when their dtypes agree)."""
    (a_start, a_stop), (b_start, b_stop) = _byte_range(a), _byte_range(b)
    if a_stop <= b_start or b_stop <= a_start:
        return False
    if a.dtype != b.dtype:
        return True
    first = min(a_start, b_start) // a.itemsize
    touched = torch.zeros(max(a_stop, b_stop) // a.itemsize - first, dtype=torch.bool, device="cpu")
    touched.as_strided(a.shape, a.stride(), int(a.storage_offset()) - first).fill_(True)
    return bool(touched.as_strided(b.shape, b.stride(), int(b.storage_offset()) - first).any())


def _byte_range(tensor: torch.Tensor) -> tuple[int, int]:
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = int(tensor.storage_offset())
    return start * tensor.itemsize, (start + extent) * tensor.itemsize


# ---- choosing unit modules --------------------------------------------------------------------------------------


def _choose(tree: _ModuleTree, found: Sequence[_Found], rule: UnitRule, min_unit_bytes: int) -> dict[str, None]:
    """First names of the unit modules, root excepted, in registration order."""
    if isinstance(rule, str) and rule != "auto":
        raise ConfigError(f'units is {rule!r} but must be "auto", a list of class names, or a function')
    if isinstance(rule, str):
        chosen = _automatic(tree, found, min_unit_bytes)
    elif callable(rule):
        chosen = {name for name, module in tree.unique() if rule(name, module)}
    else:
        chosen = _by_class(tree, rule)
    for name in chosen - {ROOT}:
        if not _has_forward(tree.by_name[name]):
            kind = type(tree.by_name[name]).__name__
            raise ConfigError(f"module {name!r} cannot be a unit: a {kind} has no forward; choose its entries instead")
    return {name: None for name, _ in tree.unique() if name in chosen and name != ROOT}


def _automatic(tree: _ModuleTree, found: Sequence[_Found], min_unit_bytes: int) -> set[str]:
    blocks = {next(tree.enclosing(name)): None for name in _blocks(tree.by_name[ROOT], ROOT)}
    own_bytes: dict[str, int] = {}
    for one in found:
        for home in {tree.home(holder) for holder in one.holders}:
            own_bytes[home] = own_bytes.get(home, 0) + one.size_bytes
    large = {home for home, size in own_bytes.items() if size > min_unit_bytes and tree.innermost(home, blocks) == ROOT}
    return set(blocks) | large


def _blocks(module: nn.Module, path: str, *, inside_list: bool = False) -> Iterator[str]:
    """Paths of the entries of the outermost lists of modules that own parameters.

    ``inside_list``: ``module`` is an entry without a forward, so its own children are the entries."""
    entries = inside_list or isinstance(module, nn.ModuleList | nn.Sequential)
    for child_name, child in module.named_children():
        child_path = f"{path}.{child_name}" if path else child_name
        if not any(True for _ in child.parameters()):
            continue
        if entries and _has_forward(child):
            yield child_path
        else:
            yield from _blocks(child, child_path, inside_list=entries)


def _by_class(tree: _ModuleTree, names: Sequence[str]) -> set[str]:
    kinds = {type(module).__name__ for module in tree.by_name.values()}
    for name in names:
        if name not in kinds:
            near = difflib.get_close_matches(name, kinds, n=1)
            hint = f"the nearest is {near[0]!r}" if near else f"it has {', '.join(sorted(kinds))}"
            raise ConfigError(f"units names the class {name!r} but the model has no such module; {hint}")
    return {path for path, module in tree.unique() if type(module).__name__ in names}


# ---- grouping parameters ----------------------------------------------------------------------------------------


_Key = tuple[str, str]  # a unit module, and what its unit's parameters have in common: [Note: siblings]


def _group(tree: _ModuleTree, found: Sequence[_Found], chosen: Mapping[str, None]) -> dict[_Key, list[_Found]]:
    """Parameters by unit, in unit order: root, unit modules in registration order, siblings together."""
    groups: dict[_Key, list[_Found]] = {}
    for one in found:
        module = tree.innermost(one.holders[0], chosen)
        groups.setdefault((module, one.suffix), []).append(one)
    place = {module: i for i, module in enumerate((ROOT, *chosen))}
    order = sorted(groups, key=lambda key: (place[key[0]], not groups[key][0].tensor.requires_grad, key[1]))
    return {key: groups[key] for key in order}


def _units_of_module(
    tree: _ModuleTree, found: Sequence[_Found], chosen: Mapping[str, None], groups: Mapping[_Key, list[_Found]]
) -> dict[str, tuple[int, ...]]:
    needed: dict[str, dict[int, None]] = {module: {} for module in (ROOT, *chosen)}
    unit_of: dict[str, int] = {}
    for unit, ((module, _), group) in enumerate(groups.items()):
        needed[module][unit] = None
        unit_of.update((one.name, unit) for one in group)
    for one in found:
        for holder in one.holders[1:]:
            needed[tree.innermost(holder, chosen)][unit_of[one.name]] = None
    return {module: tuple(units) for module, units in needed.items() if units}
