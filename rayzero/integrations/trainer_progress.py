"""What a Trainer's loop needs to go on in the middle, kept with each of its steps: a rank that dies is started again,
and repeats only its last one.

[Note: two kinds of random numbers] An epoch draws its order as it begins, and the model draws in each step. A rank that
comes back sets the generators to what they were at the epoch's beginning, lets the loader skip the batches that were
used, then sets the generators to what they were when the open step had its batches. So reading an example must draw
nothing: what a dataset draws between two steps cannot be drawn again for one example alone.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import torch
from transformers.trainer_callback import ExportableState

from rayzero.checkpoint.state_values import to_bytes
from rayzero.engine.context import get_context
from rayzero.engine.loop.comeback import generator_states, set_generator_states
from rayzero.errors import UnsupportedError

_ELSEWHERE = ("log_history", "stateful_callbacks")  # fields of TrainerState that are kept in other ways
_COUNTERS = (  # of one train(), in the Trainer itself
    "_total_loss_scalar",
    "_globalstep_last_logged",
    "_initial_global_step",
    "_initial_num_input_tokens_seen",
    "current_flos",
)


class TrainerProgress:
    """The position of a Trainer's loop, and all that it has counted, as an object to be tracked.

    Knows what a Trainer changes from step to step; not when its state is kept, nor where."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._log = _LogText()
        self.call = 0  # of train()
        self.epoch = 0
        self.updates = 0  # of this epoch, whose batches were taken
        self._open = -1  # the engine's step whose batches were taken last
        self._shuffled: dict[str, Any] = {}  # the generators' states at the epoch's beginning
        self._drawn: dict[str, Any] = {}  # the same, once the open step's batches were taken
        self._kept: dict[str, Any] = {}  # ``_drawn`` of an earlier life
        self._means = 0  # over ranks, before the open step's batches were taken: their tokens are counted together
        self._draws = False  # reading examples changes the generators
        self._first = True  # no batches of this epoch were taken here
        self._loops = False  # an epoch's loop runs
        self._return: dict[str, Any] | None = None  # where a rank that has come back goes on; None: at the beginning

    # ---- as a tracked object

    def state_dict(self) -> dict[str, Any]:
        """The loop's state, now."""
        trainer = self._trainer
        fields = [f.name for f in dataclasses.fields(trainer.state) if f.name not in _ELSEWHERE]
        return {
            "call": self.call,
            "epoch": self.epoch,
            "updates": self.updates - 1,  # the last one is open
            "open": self._open,
            "shuffled": self._shuffled,
            "drawn": self._drawn,
            "means": self._means,
            "draws": self._draws,
            "state": {name: getattr(trainer.state, name) for name in fields},
            "log": self._log.of(trainer.state.log_history),
            "callbacks": [each.state() for each in self._stateful()],
            "loss": trainer._tr_loss,
            "counters": {name: getattr(trainer, name) for name in _COUNTERS},
            "scheduler": trainer.lr_scheduler.state_dict(),
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Take a state that ``state_dict`` returned. Raises UnsupportedError if the loop cannot go on from it."""
        trainer = self._trainer
        if not self._loops:
            self._return = self._checked(saved)
        for name, value in saved["state"].items():
            setattr(trainer.state, name, value)
        trainer.state.log_history = self._log.entries(saved["log"])
        for each, state in zip(self._stateful(), saved["callbacks"], strict=True):
            kept = (
                state["args"] if each is trainer.control else state["attributes"]
            )  # a callback was made with its args
            for name, value in kept.items():
                setattr(each, name, value)
        trainer._tr_loss = saved["loss"].to(trainer._tr_loss.device)
        for name, value in saved["counters"].items():
            setattr(trainer, name, value)
        trainer.lr_scheduler.load_state_dict(saved["scheduler"])

    def _stateful(self) -> list[Any]:
        """The callbacks whose states the Trainer saves, and its control."""
        known = [*self._trainer.callback_handler.callbacks, self._trainer.control]
        return [each for each in known if isinstance(each, ExportableState)]

    def _checked(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        rank, why = get_context().rank, None
        if saved["call"] != self.call:
            why = f"it had begun train() number {saved['call']}, and earlier ones cannot be done again"
        elif saved["open"] != get_context().step:
            why = "its model ran with gradients outside of the Trainer's steps"
        elif saved["draws"]:
            why = "its dataset draws random numbers when it reads an example, from generators that the model uses too"
        if why is None:
            return dict(saved)
        raise UnsupportedError(
            f"rank {rank} has died and come back, but its Trainer cannot repeat step {get_context().step}: {why}; "
            "resume with trainer.train(resume_from_checkpoint=...) in a new run"
        )

    # ---- as the Trainer's loop goes

    def begin_train(self) -> None:
        """train() has made the model and its state."""
        self.call += 1
        self._loops, self._return = False, None

    def begin_epoch(self, epoch: int, updates: int) -> dict[str, Any] | None:
        """An epoch begins after ``updates`` of its steps. Returns where to go on instead, in a rank that has come back;
        None: as the Trainer says."""
        self._loops = True
        back = self._return
        if back is not None and epoch < back["epoch"]:
            return back
        self._return = None
        self.epoch, self.updates = epoch, back["updates"] if back is not None else updates
        if back is not None:
            set_generator_states(back["shuffled"], self._device)
            self._kept = back["drawn"]
            self._store.means = back["means"]
        self._shuffled = generator_states(self._device)
        self._first = True
        return back

    def takes_batches(self) -> None:
        """A step's batches are taken next."""
        self._means = self._store.means

    def took_batches(self, before: dict[str, Any]) -> None:
        """A step has its batches. ``before``: the generators' states before they were taken."""
        self._drawn = generator_states(self._device)
        self._draws |= not self._first and not _equal(before, self._drawn)  # the first call draws the epoch's order
        self._first = False
        self.updates += 1
        self._open = get_context().step

    def restore_generators(self) -> None:
        """The first step of a rank that has come back has its batches: set the generators as they were then."""
        set_generator_states(self._kept, self._device)
        self._drawn = self._kept

    def generators_changed(self) -> None:
        """A resumed Trainer has set the generators: at an epoch's beginning, or once its first step has its batches."""
        if self._first:
            self._shuffled = generator_states(self._device)
        else:
            self._drawn = generator_states(self._device)

    def generators(self) -> dict[str, Any]:
        """Their states now."""
        return generator_states(self._device)

    @property
    def _store(self) -> Any:
        return self._trainer.zero_optimizer.engine.store

    @property
    def _device(self) -> torch.device:
        return self._trainer.zero_optimizer.engine.device  # type: ignore[no-any-return]


class _LogText:
    """A Trainer's log as text, which grows by the new entries only, because it is kept with every step."""

    def __init__(self) -> None:
        self._text = bytearray()
        self._lines = 0

    def of(self, history: list[dict[str, Any]]) -> torch.Tensor:
        """The log as bytes, one entry a line."""

        def plain(value: Any) -> Any:  # a scalar of numpy or torch; text for anything else
            return value.item() if hasattr(value, "item") else str(value)

        if len(history) < self._lines:
            self._text, self._lines = bytearray(), 0
        for entry in history[self._lines :]:
            self._text += json.dumps(entry, default=plain).encode() + b"\n"
        self._lines = len(history)
        return (
            torch.frombuffer(bytearray(self._text), dtype=torch.uint8)
            if self._text
            else torch.empty(0, dtype=torch.uint8, device="cpu")
        )

    def entries(self, text: torch.Tensor) -> list[dict[str, Any]]:
        """The log that ``of`` returned the bytes of."""
        self._text = bytearray(text.numpy().tobytes())
        history = [json.loads(line) for line in self._text.splitlines()]
        self._lines = len(history)
        return history


def _equal(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether the generators of the CPU are in the same states."""
    kinds = ("torch", "numpy", "python")
    return to_bytes({kind: one[kind] for kind in kinds}) == to_bytes({kind: other[kind] for kind in kinds})
