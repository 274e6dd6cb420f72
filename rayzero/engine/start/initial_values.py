"""First values: finds a source for each parameter and buffer, and sends the values to the owners.

[Note: starting] A parameter's first value comes from the first of these that has it: the checkpoint, if the run
resumes; ``weights``; ``init``; the Parameter itself. A Parameter on the meta device holds nothing, so on rank 0 one of
the others must give it a value. The other ranks' parameters are never used and may all be on meta; buffers are each
rank's own. Everything is checked before anything changes; then one unit's vector at a time is filled and sent. Weights
from an iterator come in any order: they are gathered into units, each of which is sent once complete.

Opaque parameters ([Note: opaque] in units/partition.py) get their bytes from somewhere only where these still mean the
same. Their class may keep the key to them among the attributes of the Parameter (bitsandbytes' ``quant_state``).
Neither checkpoints nor owners have it: it is the model's own, on every rank, so the bytes must be the model's own, too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from itertools import chain, pairwise
from pathlib import Path

import torch
from torch import Tensor, nn

from rayzero.checkpoint.reader import CheckpointReader
from rayzero.checkpoint.tensor_file import as_bytes, tensor_digest
from rayzero.codecs.record import codec_of
from rayzero.convert.weights import NamedWeights, Wanted, WeightDecl, Weights, declare_weight, misfits
from rayzero.engine.start.buffers import fill_buffers
from rayzero.engine.start.unit_init import Init, UnitInit
from rayzero.engine.units.partition import UnitPlan, is_opaque
from rayzero.errors import CheckpointError, ConfigError, UnsupportedError
from rayzero.layout.model_layout import ParamSlot, UnitLayout, dtype_name
from rayzero.protocol.messages import COMPUTE, same_bits
from rayzero.tensor_metadata import class_name, own_class, plain

_SEEN = 1 << 16  # elements; of 4-bit codes viewed as floats, at least one of some thousand is NaN


def refuse_apart(plan: UnitPlan, params: Mapping[str, nn.Parameter], device: torch.device) -> None:
    """Raise UnsupportedError for an opaque parameter with a key that is not on ``device``, where the rank computes:
    only its class can move the key."""
    for name in (slot.name for unit in plan.layout.units if unit.opaque for slot in unit.slots):
        param = params[name]
        if _has_key(param) and param.device != device:
            raise UnsupportedError(
                f"parameter {name!r} is a {class_name(param)} on {param.device}, and this rank computes on {device}: "
                f"its attributes ({_keys(param)}) cannot be moved by rayzero.prepare(); call model.to({str(device)!r}) "
                "before"
            )


def refuse_codes(plan: UnitPlan, params: Mapping[str, nn.Parameter]) -> None:
    """Raise UnsupportedError for a frozen plain Parameter with NaN among its first elements whose values would not be
    kept as they are: weights have none, but codes that are viewed as floats do."""
    for unit in plan.layout.units:
        for slot in () if unit.trainable or unit.opaque else unit.slots:
            param = params[slot.name]
            changes = param.dtype is not unit.dtype or codec_of(unit).lossy
            if changes and not param.is_meta and bool(param.detach().reshape(-1)[:_SEEN].isnan().any()):
                kept = f"{dtype_name(unit.dtype)}{f' by {unit.codec!r}' if unit.is_coded else ''}"
                raise UnsupportedError(
                    f"parameter {slot.name!r} is frozen and has NaN, as codes have that are viewed as "
                    f"{dtype_name(param.dtype)}, and would be kept as {kept}; give codes a class of their own (class "
                    "Codes(nn.Parameter)), whose bytes are never converted, or compute in their dtype"
                )


def require_own_bytes(source: object, name: str, param: nn.Parameter, value: Tensor) -> None:
    """Raise CheckpointError if ``value`` (of the parameter's shape and dtype) would give other bytes to a parameter
    whose key is the model's own."""
    if not is_opaque(param) or not _has_key(param):
        return
    if not same_bits(value.cpu(), param.detach().cpu()).all():
        raise _other_bytes(source, name, param)


def require_same_form(reader: CheckpointReader, unit: UnitLayout, slot: ParamSlot, param: nn.Parameter) -> None:
    """Raise CheckpointError if the checkpoint's values of a parameter are bytes and the model's are not, if the model
    reads those bytes as another dtype, or by a key of its own that belongs to others. ``unit``: the checkpoint's."""
    saved, ours = _form(unit.opaque, unit.dtype), _form(is_opaque(param), param.dtype)
    if saved != ours:
        raise CheckpointError(
            f"{slot.name!r} is {saved} in {reader.directory}, but {ours} in the model (a {class_name(param)}), and "
            "bytes are not converted; build the model as the run that saved it did"
        )
    if not unit.opaque or not _has_key(param) or tuple(param.shape) != slot.shape:
        return
    flat = param.detach().reshape(-1)
    for piece in reader.manifest.pieces.get((slot.name, COMPUTE), ()):
        if hashlib.sha256(as_bytes(flat[piece.start : piece.stop])).hexdigest() != piece.sha256:
            raise _other_bytes(reader.directory, slot.name, param)


def _form(opaque: bool, dtype: torch.dtype) -> str:
    return f"bytes of {dtype_name(dtype)}" if opaque else "a plain parameter"


def _has_key(param: nn.Parameter) -> bool:
    return own_class(param) is not nn.Parameter and bool(vars(param)) and not param.is_meta


def _keys(param: nn.Parameter) -> str:
    return ", ".join(vars(param))


def _other_bytes(source: object, name: str, param: nn.Parameter) -> CheckpointError:
    return CheckpointError(
        f"{name!r} is a {class_name(param)} and has other bytes in {source} than in the model; what tells their "
        f"meaning is on the model's Parameter ({_keys(param)}) and nowhere else, so build the model from the same base"
    )


class InitialValues:
    """The first values of one rank's model. Knows names and sources; not owners or steps. [Note: starting]"""

    def __init__(
        self,
        model: nn.Module,
        plan: UnitPlan,
        rank: int,
        resume: Path | None,
        weights: Weights | None,
        init: Init | None,
        *,
        held: bool = False,
    ) -> None:
        """``resume``: the model's checkpoint to continue from; None: a fresh start. ``held``: the owners have the
        values already, because this rank has come back.

        Raises CheckpointError, ConfigError or UnsupportedError, naming all that does not fit; changes nothing."""
        self._model = model
        self._plan = plan
        self._wanted = wanted_by(model)
        self._params = dict(model.named_parameters())
        self._resumed = _buffers_of(resume)  # None: a fresh start
        if self._resumed is not None:
            weights = None  # the owners restore the values; where they first came from does not matter
        self._stream = weights if weights is not None and weights.is_stream else None
        self._weights = weights.open(model, self._wanted) if weights and self._stream is None else None
        self._strict = weights is None or weights.strict
        self._init = init
        self._source_name = _source_names(self._wanted, self._weights)
        self._check_sources(weights)
        if not held:
            self._check_values(rank)
        if not held and rank == 0 and self._weights is not None:
            for name in filter(self._given, self._params):
                if is_opaque(self._params[name]):
                    require_own_bytes(
                        self._weights, name, self._params[name], self._weights.read(self._source_name[name])
                    )

    # ---- checks

    def _check_sources(self, weights: Weights | None) -> None:
        if self._init is not None and weights is not None and (self._strict or self._stream is not None):
            raise ConfigError(
                "prepare() was given weights= and init=, but weights must contain every value; to let init fill in "
                "what they lack, pass rayzero.Weights(source, strict=False) of files or a mapping; otherwise leave "
                "init out"
            )
        if self._weights is not None:
            problems = misfits(self._wanted, self._weights.decls, strict=self._strict)
            require_fit(self._weights, self._model, problems or _unequal_ties(self._wanted, self._weights))

    def _check_values(self, rank: int) -> None:
        """Raise UnsupportedError for a parameter or buffer on meta that nothing gives a value."""
        if self._stream is not None:
            return
        for name, param in self._params.items():
            if param.is_meta and rank == 0 and not (self._init or self._given(name)):
                raise UnsupportedError(
                    f"parameter {name!r} is on the meta device and nothing gives it a value: pass rayzero.prepare("
                    "weights=...), a safetensors file, a Hugging Face directory or named tensors, or init=..., a "
                    "function of a module as for model.apply"
                )
        for name in self._empty_buffers():
            if not self._init:
                raise UnsupportedError(
                    f"buffer {name!r} is on the meta device and nothing gives it a value: build the model under "
                    "rayzero.empty_parameters(), which leaves buffers real, or pass an init= that writes it"
                )

    def _empty_buffers(self) -> list[str]:
        """Buffers on meta that neither a checkpoint nor weights fill."""
        return [name for name, buffer in self._model.named_buffers() if buffer.is_meta and not self._given(name)]

    def _given(self, name: str) -> bool:
        """Whether a checkpoint or weights contain the parameter or buffer."""
        if self._resumed is not None:
            return name in self._params or name in self._resumed
        return name in self._source_name

    # ---- filling

    def bring(self, load: Load | None) -> None:
        """Fill units one by one and pass each to ``load`` (None: this rank's parameters are not used). Then fill
        buffers.

        If this fails, parameters are as they were."""
        if self._stream is not None:
            fill_buffers(self._model, take_stream(self._stream, self._model, self._plan, self._wanted, load))
        elif self._init is not None and (self._resumed is None or self._empty_buffers()):
            buffers = dict(self._model.named_buffers(remove_duplicate=False))
            sourced = {name for name in chain(self._params, buffers) if self._given(name)}
            UnitInit(self._model, self._plan, self._init, sourced).run(lambda unit: self._send(unit, load))
        else:
            for unit in self._plan.layout.units:
                self._send(unit, load)
        if self._weights is not None:
            given = [name for name, _ in self._model.named_buffers() if self._given(name)]
            fill_buffers(self._model, {name: self._weights.read(self._source_name[name]) for name in given})

    def _send(self, unit: UnitLayout, load: Load | None) -> None:
        if load is None:
            return
        flat = unit_vector(unit)
        for slot in unit.slots:
            values = flat[slot.start : slot.stop]
            if self._weights is not None and self._given(slot.name):
                self._weights.copy_to(self._source_name[slot.name], values)
            else:
                with plain():  # the value, whatever its class makes of operations
                    values.view(slot.shape).copy_(self._params[slot.name].detach())
        load(unit.index, flat).result()


def wanted_by(model: nn.Module) -> list[Wanted]:
    """The parameters and persistent buffers that ``state_dict`` has, each once, with all of its names."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        for name, tensor in chain(module._parameters.items(), module._buffers.items()):
            if tensor is not None and name not in module._non_persistent_buffers_set:
                names.setdefault(id(tensor), []).append(dot + name)
                tensors[id(tensor)] = tensor
    return [
        Wanted(
            names=tuple(names[key]),
            shape=tuple(tensor.shape),
            dtype=dtype_name(tensor.dtype),
            exact=isinstance(tensor, nn.Parameter) and is_opaque(tensor),
        )
        for key, tensor in tensors.items()
    ]


def require_weights(model: nn.Module, path: str) -> None:
    """Raise CheckpointError, naming every mismatch, if the weights at ``path`` do not fit. The model may be on meta."""
    wanted = wanted_by(model)
    weights = Weights(path).open(model, wanted)
    require_fit(weights, model, misfits(wanted, weights.decls, strict=True))


def _buffers_of(resume: Path | None) -> frozenset[str] | None:
    """Names of the buffers in the checkpoint to resume from; None: a fresh start."""
    if resume is None:
        return None
    with CheckpointReader(resume) as reader:
        return frozenset(reader.buffers())


def _source_names(wanted: Iterable[Wanted], weights: NamedWeights | None) -> dict[str, str]:
    """Each of the model's names -> a name under which ``weights`` have its value."""
    held = () if weights is None else weights.decls
    return {
        name: found
        for one in wanted
        if (found := next((n for n in one.names if n in held), None))
        for name in one.names
    }


def _unequal_ties(wanted: Iterable[Wanted], weights: NamedWeights) -> list[str]:
    problems = []
    for one in wanted:
        held = [name for name in one.names if name in weights]
        for first, second in pairwise(held):
            if not torch.equal(weights.read(first), weights.read(second)):
                problems.append(f"{first!r} and {second!r} differ there, but are one tensor in the model")
    return problems


# ---- weights from an iterator ----------------------------------------------------------------------------------------


Load = Callable[[int, Tensor], Future[None]]


def unit_vector(unit: UnitLayout) -> Tensor:
    """Zeros for a unit's initial values, as ``ParameterStore.load`` takes them."""
    return torch.zeros(unit.numel, dtype=unit.initial_dtype, device="cpu")


def require_fit(source: object, model: nn.Module, problems: Sequence[str]) -> None:
    """Raise CheckpointError if there are problems."""
    if problems:
        raise CheckpointError(f"{source} does not fit this {type(model).__name__}: {'; '.join(problems)}")


def take_stream(
    weights: Weights, model: nn.Module, plan: UnitPlan, wanted: Sequence[Wanted], load: Load | None
) -> dict[str, Tensor]:
    """Read the stream to its end, loading units; returns the values of buffers. ``load``: None if only buffers are
    used.

    Raises CheckpointError as soon as a tensor does not fit, and at the end if some are missing."""
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    by_name = {name: one for one in wanted for name in one.names}
    gathered = _Gathered(plan.layout.units, load)
    buffers: dict[str, Tensor] = {}
    seen: dict[str, WeightDecl] = {}
    digests: dict[str, str] = {}  # of tied ones
    for name, tensor in weights.stream(model, wanted):
        one = by_name.get(name)
        decl = declare_weight(name, tensor)
        problems = misfits([one] if one else [], {name: decl}, strict=weights.strict)
        if name in seen:
            problems.append(f"{name!r} comes twice")
        seen[name] = decl
        if one is not None and len(one.names) > 1 and not problems:
            first, digest = one.names[0], tensor_digest(tensor)
            if digests.setdefault(first, digest) != digest:
                problems.append(f"the names of {first!r}, which is tied in the model, have different values")
        require_fit("the stream of weights", model, problems)
        if one is not None:
            first = next(alias for alias in one.names if alias in tensors)
            held = tensors[first]
            if isinstance(held, nn.Parameter):
                require_own_bytes("the stream of weights", first, held, tensor)
                gathered.take(first, tensor)
            else:
                buffers[first] = tensor.detach().clone()
    lacking = [
        f"it lacks {one.names[0]!r}, which is on the meta device" for one in wanted if _is_lacking(one, seen, tensors)
    ]
    require_fit("the stream of weights", model, misfits(wanted, seen, strict=weights.strict) or lacking)
    gathered.take_rest(tensors)
    return buffers


def _is_lacking(one: Wanted, seen: dict[str, WeightDecl], tensors: dict[str, Tensor]) -> bool:
    return not any(name in seen for name in one.names) and any(tensors[n].is_meta for n in one.names if n in tensors)


class _Gathered:
    """Units of which some parameters have come. Knows a parameter only by its first name in the layout."""

    def __init__(self, units: Sequence[UnitLayout], load: Load | None) -> None:
        self._load = load
        self._place = {slot.name: (unit, slot) for unit in units for slot in unit.slots}
        self._awaited = {unit.index: {slot.name for slot in unit.slots} for unit in units}
        self._flats: dict[int, Tensor] = {}  # freed by: the unit's last parameter

    def take(self, name: str, value: Tensor) -> None:
        """Take one parameter's values. A repeat (another name of a tied parameter) changes nothing."""
        unit, slot = self._place[name]
        awaited = self._awaited[unit.index]
        if self._load is None or name not in awaited:
            return
        if unit.index not in self._flats:
            self._flats[unit.index] = unit_vector(unit)
        self._flats[unit.index][slot.start : slot.stop].view(slot.shape).copy_(value.detach())
        awaited.remove(name)
        if not awaited:
            self._load(unit.index, self._flats.pop(unit.index)).result()

    def take_rest(self, tensors: dict[str, Tensor]) -> None:
        """Fill parameters that did not come with the model's own values."""
        for names in self._awaited.values():
            for name in list(names):
                self.take(name, tensors[name])
