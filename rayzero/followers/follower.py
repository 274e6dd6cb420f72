"""The weights of a run, version by version, for a process that takes no part in it."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from rayzero.errors import ConfigError, StallError, StoreClosedError, VersionGoneError
from rayzero.followers.held_version import Declared, FollowerStats, HeldVersion, Names, OwnNames, Shards, Tally
from rayzero.layout.model_layout import ModelLayout, loses_bits

_T = TypeVar("_T")

WAIT_S = 600.0
_QUICKEST_S, _SLOWEST_S = 0.001, 0.02  # between two looks
_ENDED_S = 5.0  # how long a run's memory is gone before the run counts as ended: it may begin again


class FollowedRun(Protocol):
    """Where a run's shards are found. Used by one thread at a time."""

    run: str  # its name

    @property
    def missing(self) -> str:
        """Why there are no shards, in words."""
        ...

    def shards(self) -> Shards | None:
        """Those of the present owners; None: they are not there (yet, or any more). Does not wait. Raises
        UnsupportedError for shards that followers cannot read."""
        ...

    def has(self, shards: Shards) -> bool:
        """Whether nobody else publishes, by now, what ``shards`` reads."""
        ...

    def close(self) -> None:
        """Let everything go. Idempotent."""
        ...


class Reading(Iterator[tuple[str, Tensor]]):
    """One version, tensor by tensor. It is held in this process until the last tensor, or ``close``.

    A tensor is the follower's memory: do not write to it, and copy what is needed after the loop. If the follower reads
    another version meanwhile, the next tensor raises VersionGoneError; those that are out stay as they are."""

    def __init__(self, held: HeldVersion, names: Names) -> None:
        self.version = held.version
        self.held: HeldVersion | None = held  # None: it needs it no more
        self._tensors = names.tensors(held)
        self._lost: VersionGoneError | None = None

    def __next__(self) -> tuple[str, Tensor]:
        if self._lost is not None:
            raise self._lost
        try:
            return next(self._tensors)
        except StopIteration:
            self.close()
            raise

    def lose(self, newer: int) -> None:
        """The follower reads another version: this one is held no more."""
        self._lost = VersionGoneError(
            f"v{self.version} was held for a reader until the follower began to read v{newer}: end one reading, or "
            "close it, before the next, or follow the run twice"
        )
        self.close()

    def close(self) -> None:
        """Hold the version no more. Idempotent."""
        self.held, self._tensors = None, iter(())


class Follower:
    """Reads a run's published weights. Several threads may use it.

    Knows versions, and one of them in its own memory; not who publishes. Nobody waits for it, and it writes nothing
    that the run has."""

    def __init__(
        self, run: FollowedRun, config: Path | None, is_over: Callable[[], bool], *, strict: bool = True
    ) -> None:
        """``rayzero.follow`` calls it. config: transformers' config of the model; None: there is none. is_over: whether
        a run without memory is not to begin again. strict: whether another model's ``config`` is refused; else the
        names are those of the model's parameters."""
        self._run, self._config, self._is_over, self._strict = run, config, is_over, strict
        self._lock = threading.RLock()
        self._shards: Shards | None = None  # those seen last
        self._gone_s: float | None = None  # since when there are none
        self._held: HeldVersion | None = None  # freed by: close()
        self._names: tuple[str, Names] | None = None  # with the digest of the layout
        self._readings = weakref.WeakSet[Reading]()
        self._last = -1  # the version that was read last
        self._tally = Tally()
        self._closed = False
        weakref.finalize(self, run.close).atexit = False  # of a follower that nobody closes: threads and connections

    # ---- versions

    @property
    def version(self) -> int:
        """The newest version that is published as a whole; -1: none is yet. Version v is the weights after v steps."""
        with self._lock:
            shards = self._present()
            return -1 if shards is None else shards.version

    def wait(self, version: int | None = None, *, timeout_s: float = WAIT_S) -> int:
        """Wait until ``version`` or a later one is published; None: one that is newer than what was read last. Returns
        the newest. Raises StallError if none comes in time, StoreClosedError if the run ended without one."""
        _require(version, timeout_s)
        began = time.monotonic()
        while True:
            with self._lock:
                newest = self.version
                wanted = self._last + 1 if version is None else version  # also of a run that has begun again
            if newest >= wanted:
                return newest
            self._pause(f"v{wanted}", newest, began, timeout_s)

    # ---- values

    def read(self, version: int | None = None, *, timeout_s: float = WAIT_S) -> Reading:
        """A version's tensors as (name, tensor), with the names, shapes and dtypes of a folder that is exported in the
        dtype of training. None: the newest. A version that is not published yet is waited for.

        Raises VersionGoneError if newer ones have overwritten it, else as ``wait``."""
        return self._use(version, timeout_s, lambda held: self._read(held, self._names_of(held.layout)))

    def into(self, model: nn.Module, version: int | None = None, *, timeout_s: float = WAIT_S) -> int:
        """Copy a version into a model's parameters, in place; returns it. The model has the parameters of the model in
        training, under those names or published ones; buffers stay as they are.

        Raises ConfigError that names what differs, before anything is copied, else as ``read``."""

        def copy(held: HeldVersion) -> int:
            own = OwnNames(held.layout)
            fits = own.declared.keys() <= dict(model.named_parameters(remove_duplicate=False)).keys()
            names = own if fits else self._names_of(held.layout)
            targets = _targets(model, names.declared)
            with torch.no_grad():
                for name, tensor in self._read(held, names):
                    targets[name].copy_(tensor)
            return held.version

        if not isinstance(model, nn.Module):
            raise ConfigError(f"model is of type {type(model).__name__} but must be a torch.nn.Module")
        return self._use(version, timeout_s, copy)

    @property
    def declared(self) -> Declared:
        """Dtype and shape of every tensor by name, as ``read`` gives them. Raises as ``wait``, for any version."""
        self.wait(0)
        with self._lock:
            assert self._shards is not None
            return self._names_of(self._shards.layout).declared

    def stats(self) -> FollowerStats:
        """What it has taken so far: versions, bytes, seconds."""
        return self._tally.stats

    def _use(self, version: int | None, timeout_s: float, use: Callable[[HeldVersion], _T]) -> _T:
        """What ``use`` makes of a version, while no other thread makes it lose that."""
        _require(version, timeout_s)
        began = time.monotonic()
        while True:
            with self._lock:
                newest, held = self._bring(version)
                if held is not None:
                    return use(held)
            self._pause("any version" if version is None else f"v{version}", newest, began, timeout_s)

    def _read(self, held: HeldVersion, names: Names) -> Reading:
        reading = Reading(held, names)
        self._readings.add(reading)
        self._last = held.version
        return reading

    def _bring(self, version: int | None) -> tuple[int, HeldVersion | None]:
        """The newest version, and the one that is asked for, in this process's memory; None: not now."""
        shards = self._present()
        newest = -1 if shards is None else shards.version
        wanted, held = newest if version is None else version, self._held
        if (
            held is not None
            and held.version == wanted
            and (wanted < newest or any(self._readers()) or (shards is not None and held.is_still(shards)))
        ):
            return newest, held
        if wanted < newest:
            raise VersionGoneError(f"v{wanted} is overwritten: v{newest} is published")
        if shards is None or not 0 <= wanted == newest:
            return newest, None
        taken = self._memory_for(shards.layout, wanted)
        if not taken.take(shards, wanted, self._tally):
            return newest, None
        if not self._run.has(shards):  # other owners may be changing the memory, and say so in other lines
            taken.version = -1
            return newest, None
        return newest, taken

    def _readers(self) -> list[Reading]:
        """Those that need the held version. While there are any, all read the same."""
        return [each for each in self._readings if each.held is not None and each.held is self._held]

    def _memory_for(self, layout: ModelLayout, version: int) -> HeldVersion:
        """Where a version is copied to: over the one that is held, unless a reader needs that."""
        needed = self._readers()
        for reading in needed:
            reading.lose(version)
        if self._held is None or needed or self._held.layout.digest != layout.digest:
            self._held = HeldVersion(layout)
        return self._held

    def _names_of(self, layout: ModelLayout) -> Names:
        """The published names, if the config is of a model of transformers with these parameters and transformers is
        installed; else the model's own or, if that is refused, ConfigError."""
        if self._names is None or self._names[0] != layout.digest:
            found: Names | None = None
            if self._config is not None:
                from rayzero.followers.published_names import published_names  # brings the formats of checkpoints

                found, why = published_names(layout, self._config)
                if found is None and self._strict:
                    raise ConfigError(
                        f"the weights come only {why}: pass the config.json of the model in training, or none"
                    )
            self._names = layout.digest, found or OwnNames(layout)
        return self._names[1]

    # ---- the run

    def _present(self) -> Shards | None:
        """The owners' shards; of a run that has ended, those that it had last. None: there have been none."""
        if self._closed:
            raise StoreClosedError("the follower was used after close()")
        found = self._run.shards()
        if found is None:
            self._gone_s = self._gone_s or time.monotonic()
            return self._shards
        if self._shards is not None and self._shards.lineage != found.lineage:  # it began again: versions do, too
            self._held, self._last = None, -1
        self._shards, self._gone_s = found, None
        return found

    def _pause(self, what: str, newest: int, began: float, timeout_s: float) -> None:
        """Wait a little. Raises StallError if time is up, StoreClosedError if the run has ended."""
        waited, gone_s = time.monotonic() - began, self._gone_s
        if self._shards is not None and gone_s is not None and time.monotonic() - gone_s > _ENDED_S:
            if self._is_over():
                raise StoreClosedError(
                    f"run {self._run.run!r} has ended, or none of its optimizers is reached from here any more: "
                    f"v{newest} was the last here"
                )
            self._gone_s = time.monotonic()
        if waited >= timeout_s:
            state = self._run.missing or (f"v{newest} is published" if newest >= 0 else "it has no values yet")
            raise StallError(f"{what} of run {self._run.run!r} did not come in {timeout_s:g} s: {state}")
        time.sleep(min(max(_QUICKEST_S, waited / 10), _SLOWEST_S, timeout_s - waited))

    def close(self) -> None:
        """Let the run's memory and the held version go. Idempotent."""
        with self._lock:
            self._closed, self._shards, self._held = True, None, None
            self._run.close()

    def __enter__(self) -> Follower:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _require(version: object, timeout_s: object) -> None:
    """Raise ConfigError unless ``version`` can be one, and ``timeout_s`` a time to wait."""
    if version is not None and (type(version) is not int or version < 0):
        raise ConfigError(f"version is {version!r} but must be a whole number of steps, 0 or more, or None")
    if type(timeout_s) not in (int, float) or not timeout_s >= 0:  # type: ignore[operator]
        raise ConfigError(f"timeout_s is {timeout_s!r} but must be a number of seconds, 0 or more")


def _targets(model: nn.Module, declared: Declared) -> dict[str, Tensor]:
    """A model's parameters by the names of what is to be copied into them. Raises ConfigError if something differs."""
    targets: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    if unknown := sorted(declared.keys() - targets.keys()):
        raise ConfigError(f"the model has no parameter {unknown[0]!r}, which the run publishes ({len(unknown)} such)")
    filled = {id(targets[name]): name for name in declared}
    if lacking := sorted(name for name, tensor in targets.items() if id(tensor) not in filled):
        raise ConfigError(f"the run publishes no {lacking[0]!r}, which the model has ({len(lacking)} such)")
    for name, (dtype, shape) in declared.items():
        target = targets[name]
        if (other := filled[id(target)]) != name:
            raise ConfigError(f"{other!r} and {name!r} are one tensor in the model and two in the run")
        if (there := _unfit(target)) or tuple(target.shape) != shape:
            there = there or f"of shape {tuple(target.shape)}"
            raise ConfigError(f"{name!r} is {there} in the model and of shape {shape} in the run")
        if loses_bits(dtype, target.dtype):
            raise ConfigError(f"{name!r} is {target.dtype} in the model, which cannot hold the run's {dtype}")
    return targets


def _unfit(target: Tensor) -> str:
    """Why values of no shape can be copied into a tensor; "": they can."""
    if is_lazy(target) or target.is_meta:
        return "without memory"
    if target.layout is not torch.strided:
        return f"of layout {target.layout}"
    if target.is_inference() and not torch.is_inference_mode_enabled():
        return "an inference tensor, which only torch.inference_mode() may change,"
    if any(size > 1 and stride == 0 for size, stride in zip(target.shape, target.stride(), strict=True)):
        return "an expanded tensor"
    return ""
