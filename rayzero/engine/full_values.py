"""A prepared model's complete values: read as a state dict, present in its Parameters for a while, given back, or
replaced by those of a checkpoint, as ``prepare()`` does when a run resumes, but in the middle of a run.

Owners read a checkpoint's files only at their start. Here every rank reads them, one unit at a time, and sends the
values to the owners as writes: masters, moments and step counts, without rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor, nn

from rayzero.checkpoint.reader import CheckpointReader
from rayzero.checkpoint.state_values import unpack
from rayzero.engine.checkpoint import check_resume, of_model, require_model, widest_kind
from rayzero.engine.context import get_context
from rayzero.engine.engine import Engine
from rayzero.engine.loop.comeback import names_of
from rayzero.engine.optimizer.param_groups import ResumedGroups
from rayzero.engine.optimizer.states import Forms, check_states, write_states
from rayzero.engine.optimizer.zero_optimizer import ZeroOptimizer
from rayzero.engine.prepare import engine_of
from rayzero.engine.start.buffers import fill_buffers
from rayzero.engine.units.param_unit import ParamUnit
from rayzero.errors import CheckpointError
from rayzero.kernels.optimizer_class import State
from rayzero.kernels.optimizer_states import is_scalar, leaves, restored_state
from rayzero.layout.model_layout import ParamSlot
from rayzero.protocol.messages import COMPUTE, MASTER


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Complete CPU tensors under plain names, in the model's own order; loads into the plain model.

    Parameters are the fp32 masters after exactly the last step, with what this rank has written since; tied ones appear
    under each of their names. A frozen parameter has the compute dtype if that holds its values exactly, else fp32.
    Persistent buffers keep their dtype. Reads unit by unit; waits for the last step's update, but for no other rank.
    Raises UnsupportedError if the model is not prepared, or if it was given parameters since."""
    engine = engine_of(model)
    engine.registered.refuse_added()
    values: dict[int, Tensor] = {}
    for unit in engine.units:
        flat = engine.values.masters(unit)
        for slot, param in zip(unit.layout.slots, unit.params, strict=True):
            values[id(param)] = flat[slot.start : slot.stop].view(slot.shape).clone()
    return _in_model_order(model, values)


def _in_model_order(model: nn.Module, values: Mapping[int, Tensor]) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            state[dot + name] = values[id(param)]
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            if name not in module._non_persistent_buffers_set:
                state[dot + name] = buffer.detach().cpu().clone()
    return state


@contextmanager
def full_parameters(model: nn.Module, *, modify: bool = False) -> Iterator[None]:
    """Inside the context every Parameter holds its full values after exactly the last step, in its compute dtype.

    The whole model must fit gpu_param_memory_budget. Writes that torch counts are always kept; with modify=True also
    others (numpy). They reach the owners with the next clip, step or save_checkpoint, and every rank must
    write the same values. Raises UnsupportedError if the model is not prepared, MemoryPlanError if it does not
    fit."""
    with engine_of(model).complete(modify=modify):
        yield


def release(model: nn.Module) -> None:
    """Give back the memory that this rank holds for a model, until the next forward and backward take it again.

    For the time in which something else has the device or the host: an engine that generates, an evaluation. It frees
    gathered parameters, prefetches, staging buffers, buffers of offloaded activations, the memory in which owners of
    this host read gradients (not where it is page-locked for a CUDA device), and what malloc and torch's allocator
    keep. Parameters that views or graphs hold stay; no value changes. Waits for the last step's update, and so for the
    other ranks' ``step()``.

    Raises UnsupportedError inside a forward or backward, while the open step may have a graph of a forward or
    gradients, and in another thread than the one that trains. If gradients find no room afterwards, the backward raises
    MemoryPlanError."""
    engine_of(model).release()


def load_checkpoint(optimizer: ZeroOptimizer, directory: Path | str) -> None:
    """Replace the model's parameters and buffers, the optimizer's states and the options of its parameter groups by
    those that ``save_checkpoint`` wrote to ``directory``. Every rank calls it between two steps, with the same
    directory.

    The run's step count, the loop state and random generators stay as they are. Any number of ranks and owners may have
    written the checkpoint. A rank without a file in it takes rank 0's buffers and groups. Raises CheckpointError,
    before anything is changed, if the checkpoint is missing, damaged or of another model."""
    engine, rank = optimizer.engine, get_context().rank
    directory = of_model(Path(directory), engine.number)
    require_model(directory)
    with CheckpointReader(directory) as reader:
        reader.require_classes(optimizer.classes)
        _check_parameters(reader, engine.units)
        check_resume(directory, engine.model)
        forms = optimizer.forms()
        states = _SavedStates(reader, engine, forms)
        check_states(engine, forms, states)
        file = rank if rank < reader.world_size else 0
        state = unpack(*reader.rank_state(file))
        groups = ResumedGroups(state["groups"], names_of(engine.model), str(directory))
        groups.require_classes(optimizer.param_groups)
        engine.drain()
        engine.cache.write_back()
        for unit in engine.units:
            engine.values.load(unit, {i: _value(reader, slot) for i, slot in enumerate(unit.layout.slots)})
        write_states(engine, forms, states)
        fill_buffers(engine.model, reader.buffers(file))
    groups.restore(optimizer.param_groups)


def _check_parameters(reader: CheckpointReader, units: list[ParamUnit]) -> None:
    saved = {slot.name: (slot.shape, unit.trainable) for unit in reader.layout.units for slot in unit.slots}
    for unit in units:
        for slot in unit.layout.slots:
            ours = (slot.shape, unit.layout.trainable)
            if saved.get(slot.name) != ours:
                raise CheckpointError(
                    f"{reader.directory} has {_described(saved.get(slot.name))} as {slot.name!r}, but the model has "
                    f"{_described(ours)}; it is a checkpoint of another model"
                )


def _described(param: tuple[tuple[int, ...], bool] | None) -> str:
    return "nothing" if param is None else f"a {'trained' if param[1] else 'frozen'} parameter of shape {param[0]}"


def _value(reader: CheckpointReader, slot: ParamSlot) -> Tensor:
    return reader.read_slice(slot.name, widest_kind(reader, slot.name), 0, slot.numel).view(slot.shape)


class _SavedStates(Mapping[int, State]):
    """The optimizer state of each trained Parameter, by its id; read from the checkpoint on access."""

    def __init__(self, reader: CheckpointReader, engine: Engine, forms: Forms) -> None:
        self._reader, self._forms = reader, forms
        self._slots = {
            id(engine.units[index].params[i]): (engine.units[index].layout.slots[i], group)
            for index in engine.trained.of_unit
            for i, group in engine.trained.groups_of(index).items()
        }

    def __getitem__(self, param: int) -> State:
        slot, group = self._slots[param]
        steps = self._reader.slot_step(slot.name)
        form = self._forms[group].of(slot.shape, stepped=steps > 0)
        kinds = {name for name, like in leaves(form).items() if not is_scalar(like)}
        kinds |= set(self._reader.kinds(slot.name)) - {MASTER, COMPUTE} if form else set()
        values = {kind: self._reader.read_whole(slot.name, kind) for kind in sorted(kinds)}
        return restored_state(form, values, steps)

    def __iter__(self) -> Iterator[int]:
        return iter(self._slots)

    def __len__(self) -> int:
        return len(self._slots)
