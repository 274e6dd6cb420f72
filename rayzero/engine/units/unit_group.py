"""The all-gather of a unit's bytes between the ranks of a host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rayzero.concurrency.cuda_device import on_device, with_index
from rayzero.engine.private_torch import all_gather_into, gloo_group, nccl_group
from rayzero.errors import StoreError, UnsupportedError
from rayzero.layout.model_layout import ALIGN
from rayzero.quantities import count


def part_of(numel: int, place: int, size: int) -> tuple[int, int]:
    """(start, stop) of what the rank in ``place`` of ``size`` copies and gives to the others, in elements of a unit.

    All parts are equal, because a collective's are, and end at multiples of 64. What is left of the unit behind the
    last one, fewer than 64 elements a rank, every rank copies for itself: so the unit's buffer is the collective's
    memory, and nothing is padded. (0, 0) for a unit that is too small to share."""
    part = numel // (size * ALIGN) * ALIGN
    return place * part, (place + 1) * part


def own_elements(numel: int, size: int) -> int:
    """How many elements of a unit each of ``size`` ranks copies itself: its part, and what is left of the unit behind
    the last one; all of it if the unit is too small to share."""
    _, part = part_of(numel, 0, size)
    return part + numel - size * part


class UnitGroup:
    """The process group of a host's ranks, which torch.distributed's own groups know nothing of.

    Knows memory; not units, or who has agreed to what. All ranks call ``gather`` equally often, in the same order."""

    def __init__(self, device: torch.device, place: int, size: int, meeting: Path, timeout_s: float) -> None:
        """Connect the ranks, and gather once; blocks until all have. ``meeting``: a file that does not exist yet, the
        same on all ranks; nobody needs it afterwards. ``timeout_s``: of a gather too, on the CPU.

        Raises UnsupportedError if torch cannot do it here, StoreError if the ranks cannot connect."""
        _refuse(device)
        device = with_index(device) if device.type == "cuda" else device
        self.place, self.size = place, size
        self._streams = device.type == "cuda"
        try:
            if self._streams:
                # whoever waits here notices a rank that does not come, and ends the group; NCCL's own watchdog, which
                # ends the process, is to come later
                self._group: Any = nccl_group(meeting, place, size, 4 * timeout_s)
                with on_device(device):
                    self.gather(torch.zeros(size * ALIGN, device=device, dtype=torch.float32))
                    torch.cuda.current_stream(device).synchronize()
            else:
                self._group = gloo_group(meeting, place, size, timeout_s)
                self.gather(torch.zeros(size * ALIGN, dtype=torch.float32, device="cpu"))
        except RuntimeError as error:
            raise StoreError(
                f"host_gather=True, but the {count(size, 'rank')} of this host could not connect to each other: {error}"
            ) from error
        finally:
            if place == 0:  # all have read it once the first gather is over, or none will
                meeting.unlink(missing_ok=True)

    def gather(self, whole: Tensor) -> None:
        """Fill the parts of the other ranks in ``whole`` (1D, ``size`` equal parts, on the device), where this rank's
        own part is. On CUDA this queues work on the current stream. Raises RuntimeError if a rank is gone."""
        group = self._group
        if group is None:
            raise RuntimeError("the group has ended")
        whole = whole.view(torch.uint8)  # gloo does not know every dtype
        part = whole.numel() // self.size
        all_gather_into(group, whole, whole[self.place * part : (self.place + 1) * part])

    def end(self) -> None:
        """Leave the group. Gathers of this rank that run on a GPU end, with undefined bytes; with gloo there must be
        none, and those of the others that wait for this rank fail. Idempotent."""
        group, self._group = self._group, None
        if group is not None and self._streams:
            group.abort()


def device_name(device: torch.device) -> str:
    """A name for a device that no other device of the host has; "cpu" for all that are none of CUDA's."""
    return f"cuda {torch.cuda.get_device_properties(device).uuid}" if device.type == "cuda" else "cpu"


def _refuse(device: torch.device) -> None:
    """Raise UnsupportedError unless torch has what gathers on a kind of device."""
    import torch.distributed as dist

    backend = "nccl" if device.type == "cuda" else "gloo"
    if not dist.is_available() or not (dist.is_nccl_available() if backend == "nccl" else dist.is_gloo_available()):
        raise UnsupportedError(
            f"host_gather=True needs {backend} for ranks on {device.type.upper()}, which this torch lacks; use another "
            "build of torch, or host_gather=False"
        )
    if backend == "nccl" and dist.is_initialized() and "nccl" in dist.get_backend():
        raise UnsupportedError(
            "host_gather=True beside a torch.distributed group that uses NCCL: two NCCL groups on one GPU can wait for "
            "each other for ever; initialise yours with gloo, or use host_gather=False"
        )
