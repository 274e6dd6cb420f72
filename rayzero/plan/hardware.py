"""The machines that a run is planned for, given by the user or measured on this host."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from pathlib import Path
from time import thread_time

import psutil
import torch

from rayzero.concurrency.threads import use_torch_threads
from rayzero.errors import ConfigError
from rayzero.lanes.lane import fastest, measure_link
from rayzero.memory.process_memory import host_limits

_LARGEST = 256 << 20  # bytes of the arrays that memory speed is measured with
_PRODUCT_S = 0.2  # a size whose product takes longer is left out


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """How many hosts there are, all alike, and what ranks compute on."""

    count: int = 1
    gpus_each: int = 0  # 0: ranks compute on the hosts' CPUs

    @property
    def on_gpu(self) -> bool:
        """Whether ranks compute on GPUs."""
        return self.gpus_each > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The hosts' limits. Speeds are peaks per second, so a lower bound from them is never too high."""

    hosts: Hosts
    device_bytes: int | None  # memory of one GPU; None: not known, or no GPU
    host_bytes: int  # memory of one host that a run may take
    shm_bytes: int  # of that, the capacity of slab_dir
    flops: float  # of one GPU, or of all CPUs of a host, in the compute dtype
    link: float  # bytes, host to device and at the same time back; of one GPU
    network: float  # bytes each way, of one host
    memory: float  # bytes read and written, of one host
    host_flops: float = inf  # of matrix products in bf16, of all CPUs of one host: what Muon's updates are made of


def measure_here(dtype: torch.dtype, working_set: int, slab_dir: Path, on_gpu: bool | None = None) -> Hardware:
    """Measure this host by itself: matrix products and memory, each the best of a few short rounds (a second or two).

    working_set: bytes that an update walks through. Memory speed is measured on as many, because caches are faster and
        threads take time to start. on_gpu: measure a GPU; None: if there is one.

    Raises ConfigError if slab_dir is no folder that this process can look at."""
    on_gpu = torch.cuda.is_available() if on_gpu is None else on_gpu
    device = torch.device("cuda" if on_gpu else "cpu")
    return Hardware(
        hosts=Hosts(gpus_each=torch.cuda.device_count() if on_gpu else 0),
        device_bytes=torch.cuda.get_device_properties(0).total_memory if on_gpu else None,
        host_bytes=host_limits().available,
        shm_bytes=_room_in(slab_dir),
        flops=_product_speed(device, dtype),
        link=measure_link(device, _LARGEST).to_device if on_gpu else float("inf"),
        network=float("inf"),
        host_flops=_product_speed(torch.device("cpu"), torch.bfloat16),
        memory=max(_memory_speed(size) for size in (min(max(working_set, 1 << 20), _LARGEST), _LARGEST // 4)),
    )


def _room_in(slab_dir: Path) -> int:
    try:
        with os.scandir(slab_dir):  # disk_usage takes a file, too
            return shutil.disk_usage(slab_dir).free
    except OSError as error:
        raise ConfigError(
            f"zero.slab_dir is {str(slab_dir)!r}: {error.strerror}; name a folder in memory, such as /dev/shm"
        ) from error


def _product_speed(device: torch.device, dtype: torch.dtype) -> float:
    """Flop/s of the best size. A CPU without instructions for ``dtype`` is slow, and slower with products that leave
    its caches: a large one takes seconds, and a step is faster than that."""
    if device.type == "cuda":
        return _speed_at(8192, device, dtype)
    best = 0.0
    for size in (128, 256, 512, 1024):
        if 2 * size**3 > _PRODUCT_S * (best or inf):
            break
        best = max(best, _speed_at(size, device, dtype))
    return best


def _speed_at(size: int, device: torch.device, dtype: torch.dtype) -> float:
    a, b = (torch.randn(size, size, device=device, dtype=torch.float32).to(dtype) for _ in range(2))
    seconds = fastest(lambda: torch.mm(a, b), device)
    if device.type == "cpu":
        seconds = min(seconds, _undisturbed(lambda: torch.mm(a, b), device) / _cores())
    return 2 * size**3 / seconds


def _undisturbed(act: Callable[[], object], device: torch.device) -> float:
    """Seconds that one thread computes, without those that others had its core: a busy host does not look slow."""
    before = torch.get_num_threads()
    use_torch_threads(1)
    try:
        return fastest(act, device, clock=thread_time)
    finally:
        use_torch_threads(before)


def _cores() -> int:
    """Cores that this process may compute on; a core's second hardware thread adds nothing."""
    allowed = len(os.sched_getaffinity(0))
    return min(allowed, psutil.cpu_count(logical=False) or allowed)


def _memory_speed(size: int) -> float:
    """Bytes read and written per second by torch's threads, in place."""
    array = torch.ones(size // 4, dtype=torch.float32, device="cpu")
    return 2 * size / fastest(lambda: array.mul_(1.0), torch.device("cpu"))
