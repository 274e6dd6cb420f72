"""The user's training loop as bytes: checked and packed before Ray starts, unpacked where it runs."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ray import cloudpickle

from rayzero.errors import ConfigError

TrainLoop = Callable[..., Any]  # train_loop(config), or train_loop()


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLoop:
    """A loop and its config, packed for the ranks."""

    code: bytes
    paths: tuple[str, ...]  # the driver's sys.path: where the modules that ``code`` names are, on hosts that have it


def pack_loop(train_loop: TrainLoop, config: Any) -> PackedLoop:
    """Pack the loop and its config for the ranks. Functions of ``__main__`` are sent by value, others by name.

    Raises ConfigError when the loop is not a function of at most one argument, or cannot be sent.
    """
    _check_signature(train_loop)
    try:
        code = bytes(cloudpickle.dumps((train_loop, config)))
    except Exception as error:  # a user's object may raise anything when it is pickled
        raise ConfigError(
            f"train_loop and train_loop_config cannot be sent to other processes ({type(error).__name__}: {error}); "
            f"make them picklable"
        ) from error
    return PackedLoop(code=code, paths=tuple(os.path.abspath(path) for path in sys.path))


def unpack_loop(packed: PackedLoop) -> Callable[[], Any]:
    """A call that runs the loop with its config; raises ConfigError when this process cannot import what it needs."""
    sys.path.extend(path for path in packed.paths if path not in sys.path and os.path.isdir(path))
    try:
        train_loop, config = cloudpickle.loads(packed.code)
    except Exception as error:  # importing the user's modules may raise anything
        raise ConfigError(
            f"a rank worker cannot load train_loop: {type(error).__name__}: {error}; the module it is in must be "
            "importable there (ray job submit --working-dir, or an installed package)"
        ) from error
    takes_config = bool(inspect.signature(train_loop).parameters)
    return (lambda: train_loop(config)) if takes_config else train_loop


def _check_signature(train_loop: TrainLoop) -> None:
    if not callable(train_loop):
        raise ConfigError(f"train_loop must be a function, got {type(train_loop).__name__}")
    parameters = inspect.signature(train_loop).parameters.values()
    required = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if len(required) > 1:
        raise ConfigError(f"train_loop must take one argument, its config, or none; it takes {', '.join(required)}")
