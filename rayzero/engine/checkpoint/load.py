"""Loads a checkpoint into a prepared model: what ``prepare()`` does when a run resumes, but in the middle of a run.

Owners read a checkpoint's files only at their start. Here every rank reads them, one unit at a time, and sends the
values to the owners as writes: masters, moments and step counts, without rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor

from rayzero.checkpoint.reader import CheckpointReader
from rayzero.checkpoint.state_values import unpack
from rayzero.engine.checkpoint.save import check_resume, of_model, require_model, widest_kind
from rayzero.engine.context import get_context
from rayzero.engine.engine import Engine
from rayzero.engine.loop.comeback import names_of
from rayzero.engine.optimizer.param_groups import ResumedGroups
from rayzero.engine.optimizer.states import StateFormat, check_states, write_states
from rayzero.engine.optimizer.zero_optimizer import ZeroOptimizer
from rayzero.engine.start.buffers import fill_buffers
from rayzero.engine.units.param_unit import ParamUnit
from rayzero.errors import CheckpointError
from rayzero.kernels.optimizer_class import State
from rayzero.kernels.optimizer_states import is_scalar, leaves, restored_state
from rayzero.layout.model_layout import ParamSlot
from rayzero.protocol.messages import COMPUTE, MASTER


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
        form = StateFormat(optimizer.make, optimizer.hyper())
        states = _SavedStates(reader, engine, form)
        check_states(engine, form, states)
        file = rank if rank < reader.world_size else 0
        state = unpack(*reader.rank_state(file))
        groups = ResumedGroups(state["groups"], names_of(engine.model), str(directory))
        groups.require_classes(optimizer.param_groups)
        engine.drain()
        engine.cache.write_back()
        for unit in engine.units:
            engine.values.load(unit, {i: _value(reader, slot) for i, slot in enumerate(unit.layout.slots)})
        write_states(engine, form, states)
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

    def __init__(self, reader: CheckpointReader, engine: Engine, form: StateFormat) -> None:
        self._reader, self._form = reader, form
        self._slots = {
            id(engine.units[index].params[i]): (engine.units[index].layout.slots[i], group)
            for index in engine.trained.of_unit
            for i, group in engine.trained.groups_of(index).items()
        }

    def __getitem__(self, param: int) -> State:
        slot, group = self._slots[param]
        steps = self._reader.slot_step(slot.name)
        form = self._form.of(group, steps, slot.shape)
        kinds = {name for name, like in leaves(form).items() if not is_scalar(like)}
        kinds |= set(self._reader.kinds(slot.name)) - {MASTER, COMPUTE} if form else set()
        values = {kind: self._reader.read_whole(slot.name, kind) for kind in sorted(kinds)}
        return restored_state(form, values, steps)

    def __iter__(self) -> Iterator[int]:
        return iter(self._slots)

    def __len__(self) -> int:
        return len(self._slots)
