"""Every error that RayZero raises on purpose.

::

    RayZeroError
    ├── ConfigError              a setting is wrong (also a ValueError)
    │   └── MemoryPlanError      the plan does not fit this host
    ├── UnsupportedError         refused by name: RayZero cannot do this (yet)
    ├── DataError                training text is missing or unusable
    ├── CheckpointError          no such checkpoint, or its bytes are not what its manifest says
    │   ├── CheckpointWriteError the storage is full, read-only or gone: the checkpoint was not written
    │   └── CheckpointAbandonedError a process died while the checkpoint was written beside the training
    ├── GradientAccessError      ``.grad`` of a pushed gradient was read, or backward ran at the wrong moment
    ├── NonFiniteGradientError   ``nonfinite="raise"`` and a gradient was inf or nan
    ├── StoreError               the two sides of the store disagree or one is gone
    │   ├── HandshakeError       protocol, layout, dtypes or token differ
    │   ├── StepMismatchError    ranks sent different steps or decision inputs
    │   ├── AccumulationError    an unplanned second backward
    │   ├── RankLeftError        a rank closed its store, ended its loop or died while others wait for it
    │   ├── StallError           a peer made no progress for ``stall_timeout`` seconds
    │   ├── StateLostError       a process has died, and nobody else had what only it knew: a checkpoint brings it back
    │   │   └── UntrackedError   it was a rank, and its loop tracks nothing
    │   ├── TransferError        a checksum failed or a stream broke
    │   ├── VersionGoneError     a follower asked for weights that are overwritten, or read another version meanwhile
    │   └── StoreClosedError     the store was used after close()
    └── RunFailedError           an actor or a training loop failed: which rank, cause, traceback

Each takes one message and survives pickling, because Ray sends errors between actors.
"""

from __future__ import annotations


class RayZeroError(Exception):
    """The base of the tree. Catch it to catch everything that RayZero raises on purpose."""


class ConfigError(RayZeroError, ValueError):
    """A setting is wrong. The message names it, its value and what is allowed."""


class MemoryPlanError(ConfigError):
    """The memory plan does not fit. The message gives the sum and names the setting to change."""


class UnsupportedError(RayZeroError):
    """RayZero cannot do this, and refuses it by name instead of doing it wrong."""


class DataError(RayZeroError):
    """Training data is missing, empty or too short."""


class CheckpointError(RayZeroError):
    """A checkpoint is missing or incomplete, or its bytes differ from its manifest."""


class CheckpointWriteError(CheckpointError):
    """A checkpoint could not be written to its storage. Training can go on and try again later."""


class CheckpointAbandonedError(CheckpointError):
    """A process died while a checkpoint was written beside the training. Nothing of it is left, and training goes on;
    the next one is written at its time."""


class GradientAccessError(RayZeroError):
    """Somebody read a gradient that has already left the rank, or backward ran at the wrong moment."""


class NonFiniteGradientError(RayZeroError):
    """A gradient was inf or nan, with ``nonfinite="raise"``."""


class StoreError(RayZeroError):
    """The two sides of the store disagree, or one of them is gone."""


class HandshakeError(StoreError):
    """The two sides do not describe the same training. The message names both."""


class StepMismatchError(StoreError):
    """Ranks are at different steps or sent different decision inputs."""


class AccumulationError(StoreError):
    """A unit was pushed more often in one step than its gradient memory was planned for."""


class RankLeftError(StoreError):
    """A rank left while others wait for it."""


class EpochOverError(StoreError):
    """An owner was asked in an epoch that is over: other owners have its shards. The call is made again in the next one
    (store/rank/connection.py), so loops never see this."""


class StallError(StoreError):
    """A peer made no progress for ``stall_timeout`` seconds."""


class StateLostError(StoreError):
    """A process has died, and nobody else had what only it knew. A run with ``max_failures`` starts again from its
    newest checkpoint."""


class UntrackedError(StateLostError):
    """A rank has died and come back, but cannot repeat its step: its loop tracks nothing."""


class TransferError(StoreError):
    """Bytes arrived damaged, or a stream ended too early."""


class VersionGoneError(StoreError):
    """A follower asked for a version that newer ones have overwritten, or held one while it read another."""


class StoreClosedError(StoreError):
    """The store was used after ``close()``."""


class RunFailedError(RayZeroError):
    """A run ended because an actor or a training loop failed."""
