"""Where a rank that has died and come back goes on, and with which state: see [Note: an unfinished iteration] in
keeper.py. And what a rank's process has beside parameters and tracked objects: random number generators, and names.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn

from rayzero.checkpoint.state_values import from_bytes, to_bytes
from rayzero.engine.optimizer.param_groups import ResumedGroups
from rayzero.engine.start.buffers import fill_buffers
from rayzero.engine.units.written_units import WrittenUnits
from rayzero.errors import StateLostError, UntrackedError
from rayzero.protocol.messages import AT_COMMIT, AT_FORWARD, Attached, LoopState, MeanInput, Write
from rayzero.protocol.store import ParameterStore


def names_of(model: nn.Module) -> dict[int, str]:
    """id of each Parameter -> its first name."""
    return {id(param): name for name, param in model.named_parameters()}


def tied_names(model: nn.Module) -> dict[str, str]:
    """Other names of tied parameters -> their name in the layout."""
    first = names_of(model)
    return {name: first[id(p)] for name, p in model.named_parameters(remove_duplicate=False) if name != first[id(p)]}


def generator_states(device: torch.device) -> dict[str, Any]:
    """The states of the generators of Python, numpy and torch, on the CPU and on ``device``."""
    kind, keys, *rest = numpy.random.get_state()
    version, words, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "numpy": (kind, torch.from_numpy(numpy.asarray(keys).view(numpy.uint8).copy()), *rest),
        "python": (version, torch.from_numpy(numpy.array(words, dtype=numpy.uint32).view(numpy.uint8)), gauss),
    }


def set_generator_states(state: Mapping[str, Any], device: torch.device) -> None:
    """Put back what ``generator_states`` returned."""
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)
    kind, keys, *rest = state["numpy"]
    numpy.random.set_state((kind, keys.numpy().view(numpy.uint32), *rest))
    version, words, gauss = state["python"]
    if isinstance(words, torch.Tensor):  # checkpoints of older versions have a tuple of numbers
        words = tuple(words.numpy().view(numpy.uint32).tolist())
    random.setstate((version, words, gauss))


State = Mapping[str, Any]  # as LoopKeeper takes it

WROTE, DROPPED = (
    "wrote",
    "dropped",
)  # marks in a state: see [Note: a write in a step], [Note: gradients that are dropped]
_SINCE = {
    WROTE: "the owners may have what it wrote, but not what was there before",
    DROPPED: "the others do not compute them again",
}


@dataclass(frozen=True, kw_only=True)
class Comeback:
    """A rank's return into a run that has gone on."""

    began: Path | None  # the checkpoint that the run began with
    step: int  # that the loop does next
    state: State | None  # of that step; None: the one with which the run began
    at_commit: State | None  # the step is decided already: what to put back when the loop commits it

    @property
    def decided(self) -> int:
        """How many steps are decided."""
        return self.step + (self.at_commit is not None)

    def groups(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> ResumedGroups | None:
        """The parameter groups' options of the step; None: those that the loop gives them."""
        if self.state is None:
            return None
        names = names_of(model)
        saved = [
            {"params": [names[id(param)] for param in group["params"]], "options": options}
            for group, options in zip(optimizer.param_groups, self.state["options"], strict=False)
        ]
        return ResumedGroups(saved, names, f"the state kept at step {self.step}")

    def restore(self, store: ParameterStore, model: nn.Module, device: torch.device, writes: WrittenUnits) -> None:
        """Put back generators, buffers, the numbers of means and saves, and what the user had written; give again to
        means what the former life gave, and say which writes were made; waits until the lead knows it."""
        if self.state is not None:
            put_back(self.state, store, model, device)
            for index, values in self.state["written"]:
                writes.restore(index, values)
            for number, given in self.means:
                store.give_again(number, given).result()
            for write in self.state["made"]:
                store.made(Write(**write)).result()

    @property
    def means(self) -> list[tuple[int, MeanInput]]:
        """The former life's calls of ``mean_over_ranks`` between its last commit and its next forward: their numbers,
        and what was given."""
        if self.state is None:
            return []
        given = [MeanInput(**{**call, "values": tuple(call["values"].tolist())}) for call in self.state["calls"]]
        return list(enumerate(given, self.state["means"] - len(given) + 1))


def call_state(given: MeanInput) -> State:
    """A call of ``mean_over_ranks`` as a state has it, bit for bit."""
    values = torch.tensor(given.values, dtype=torch.float64, device="cpu")
    return {"names": given.names, "shape": given.shape, "values": values, "weight": given.weight}


def put_back(state: State, store: ParameterStore, model: nn.Module, device: torch.device) -> None:
    """Put back a state's generators, buffers and numbers of means and saves."""
    fill_buffers(model, state["buffers"])
    set_generator_states(state["rng"], device)
    store.means, store.saves = state["means"], state["saves"]


def keep_began(store: ParameterStore, attached: Attached, began: Path | None) -> None:
    """Keep what the run begins with, until a step's state says so too. A later life cannot ask its loop: what was the
    newest checkpoint then may not be the newest any more."""
    if began is not None and attached.step == attached.version:
        store.keep(LoopState(step=attached.step, part=AT_COMMIT, content=to_bytes({"began": str(began)})))


def comeback_of(
    store: ParameterStore,
    attached: Attached,
    named: Path | None,
    *,
    rank: int,
    number: int,
    repeats: int | None = None,
) -> Comeback:
    """How a rank goes on that has died. Raises StateLostError if nobody knows its loop's state: UntrackedError if it
    tracks nothing.

    named: the checkpoint that its loop names; it counts only if the rank died before it had kept the right one.
    number: the prepared model's. repeats: the open step, if all ranks do the end of the iteration before it again, as
        they do if the whole run died before all of them had ended it: they wait for each other there."""
    if number:
        raise StateLostError(
            f"rank {rank} has died and come back, but its loop prepares several models, whose steps cannot be repeated "
            "alone; resume the run from its newest checkpoint"
        )
    parts = {(each.step, each.part): from_bytes(each.content) for each in store.kept()}
    began = _began(parts, named if attached.version else None)
    if attached.step == attached.version:  # no step is decided: the loop begins as it began
        _require_repeatable(parts, attached.step, AT_COMMIT, rank, WROTE, DROPPED)
        return Comeback(began=began, step=attached.step, state=None, at_commit=None)
    if repeats != attached.step and (state := _whole(parts, attached.step)) is not None:
        _require_repeatable(parts, attached.step, AT_FORWARD, rank, WROTE, DROPPED)
        return Comeback(began=began, step=attached.step, state=state, at_commit=None)
    before, at_commit = _whole(parts, attached.step - 1), parts.get((attached.step, AT_COMMIT))
    if at_commit is not None and (before is not None or attached.step - 1 == attached.version):
        for part in (AT_COMMIT, AT_FORWARD):
            _require_repeatable(parts, attached.step, part, rank, WROTE)
        return Comeback(began=began, step=attached.step - 1, state=before, at_commit=at_commit)
    raise UntrackedError(
        f"rank {rank} has died and come back, but its loop cannot repeat step {attached.step}: its state was not "
        "kept, because it tracks nothing, or has ended with the optimizer that kept it for another host. Call "
        "rayzero.track() after prepare(), with the loop's scheduler and loader, or with nothing if it has nothing "
        "to track; or resume the run from its newest checkpoint"
    )


def _require_repeatable(parts: Mapping[tuple[int, int], State], step: int, part: int, rank: int, *marks: str) -> None:
    """Raise StateLostError if a part has one of the marks, which say what the former life did behind it."""
    for mark in marks:
        if (what := parts.get((step, part), {}).get(mark)) is not None:
            raise StateLostError(
                f"rank {rank} has died and come back, but its loop cannot repeat step {step}: it had {what}, and "
                f"{_SINCE[mark]}; resume the run from its newest checkpoint"
            )


def _began(parts: Mapping[tuple[int, int], State], otherwise: Path | None) -> Path | None:
    """The checkpoint that the run began with, as every first part has it."""
    for state in parts.values():
        if "began" in state:
            return None if state["began"] is None else Path(state["began"])
    return otherwise


def _whole(parts: Mapping[tuple[int, int], State], step: int) -> State | None:
    """The state with which ``step`` begins, from its two parts; None if one is missing."""
    commit, forward = parts.get((step, AT_COMMIT)), parts.get((step, AT_FORWARD))
    if commit is None or forward is None:
        return None
    return {**commit, **forward, "tracked": {**commit["tracked"], **forward["tracked"]}}
