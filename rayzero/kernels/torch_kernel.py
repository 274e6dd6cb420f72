"""Adam without C: by ``torch._fused_adamw_`` over tiles that stay in cache, for hosts without the native kernel and for
devices.

[Note: a tile per thread] Threads take whole tiles, and torch computes each with that thread alone. Torch's own threads
would share each of a tile's three or four operations and meet after each; if they sleep in between
(``OMP_WAIT_POLICY=PASSIVE``), waking them costs as much as the work. With bf16 gradients and parameters (28 bytes per
parameter), a Zen 5 reached 0.82-0.84 of the memory limit of the same run (lab/bench/adam.py); with torch's threads it
reached 0.81 if they spin and 0.55-0.58 if they sleep.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from rayzero.concurrency.threads import on_device, sleep_until_done, use_torch_threads
from rayzero.kernels.kernel import AdamMemory, AdamOptions, AdamUpdate, Kernel, Segment
from rayzero.kernels.rank_sum import RankSum
from rayzero.kernels.stamps import STAMP, TileStamps

Tile = tuple[Segment, int, int]  # a segment, and the first and last (excluded) of its elements in the shard

TILE = 1 << 18  # elements: 1-4 MiB of scratch per thread stay in cache between passes; smaller tiles make more calls
DEVICE_TILE = 1 << 21  # on a device: up to 44 MiB of scratch, and copies over the link that are long enough


Windows = Iterator[tuple[int, int, list[Tile]]]  # two bounds of stamps, and the tiles in between: what a thread takes


class TorchKernel(Kernel):
    """The tiled kernel. Its bits do not depend on the tile size or on threads, because segments, and so tiles, are
    multiples of 64 elements: there is no vector tail anywhere."""

    name = "torch"

    def __init__(self, tile: int = TILE, *, threads: int | None = None, device: torch.device | None = None) -> None:
        """``threads``: how many compute; None: as many as torch uses in the calling thread, at each call. ``device``:
        where the master and the moments are; None is the host. On a device, gradients and published parameters may be
        on the host, one thread computes on its own stream, and ``update`` returns when the work is done."""
        self._tile = tile
        self._threads = 1 if device is not None else threads
        self._stream = SideStream(device)
        with self._stream.used():  # scratch belongs to the stream that uses it
            self._hands = [_Hand(tile, device)]
        self._pool: ThreadPoolExecutor | None = None

    def run(self, update: AdamUpdate) -> None:
        """See ``Kernel.update``."""
        windows = list(self._windows(update.segments, update.memory.master.numel(), update.memory.stamps))
        threads = min(self._threads or torch.get_num_threads(), len(windows))
        left = iter(windows)  # a list's iterator gives each to one thread only
        if threads <= 1:
            with self._stream.used():
                self._hands[0].work(update, left)
            return
        if self._pool is None or threads > len(self._hands):
            self._hands += [_Hand(self._tile, None) for _ in range(threads - len(self._hands))]
            self._pool = ThreadPoolExecutor(threads, "rayzero-adam", initializer=use_torch_threads, initargs=(1,))
        working = [self._pool.submit(hand.work, update, left) for hand in self._hands[:threads]]
        wait(working)  # for all of them, even after an error: nothing writes to the shard once this has returned
        for work in working:
            work.result()

    def _windows(self, segments: Sequence[Segment], numel: int, stamps: TileStamps | None) -> Windows:
        size = -(-self._tile // STAMP) * STAMP
        for begin in range(0, numel, size):
            end = min(begin + size, numel)
            tiles = [tile for segment in segments for tile in self._tiles(segment, begin, end)]
            if tiles and not (stamps is not None and stamps.are_whole(begin, end)):
                yield begin, end, tiles

    def _tiles(self, segment: Segment, begin: int, end: int) -> Iterator[Tile]:
        first, last = max(begin, segment.offset), min(end, segment.offset + segment.length)
        for start in range(first, last, self._tile):
            yield segment, start, min(start + self._tile, last)


def fused_adam(
    options: AdamOptions,
    masters: list[Tensor],
    grads: list[Tensor] | tuple[Tensor, ...],
    means: list[Tensor],
    squares: list[Tensor],
    largest: list[Tensor],
    steps: list[Tensor],
) -> None:
    """Torch's fused operation. It updates masters, means, squares and, with amsgrad, ``largest`` in place. The tensors
    at one index have the same shape; those of ``steps`` are 0-dim."""
    fused = torch._fused_adamw_ if options.decoupled else torch._fused_adam_
    fused(
        masters,
        grads,
        means,
        squares,
        largest if options.amsgrad else [],
        steps,
        lr=options.lr,
        beta1=options.beta1,
        beta2=options.beta2,
        weight_decay=options.weight_decay,
        eps=options.eps,
        amsgrad=options.amsgrad,
        maximize=options.maximize,
    )


class _Hand:
    """One thread's scratch memory, and the work that it does there."""

    def __init__(self, tile: int, device: torch.device | None) -> None:
        self._sum = RankSum(tile, device)
        on = device or torch.device("cpu")
        self._scaled = torch.zeros(tile, device=on, dtype=torch.float32)
        self._step = torch.zeros((), device=on, dtype=torch.float32)  # torch's kernels read it from a tensor
        self._rounded: Tensor | None = None  # parameters for elsewhere: [Note: over the link] in rank_sum.py

    @torch.no_grad()
    def work(self, update: AdamUpdate, windows: Windows) -> None:
        """Take windows and update their tiles until none are left."""
        stamps = update.memory.stamps
        for begin, end, tiles in windows:
            with stamps.writing(begin, end) if stamps is not None else nullcontext():
                for tile in tiles:
                    self._update_tile(update, *tile)

    def _update_tile(self, update: AdamUpdate, segment: Segment, start: int, stop: int) -> None:
        memory, scale, limit = update.memory, update.scale, update.limit
        grad = self._sum.sum(update.gradients, segment.ranks, start, stop)
        if scale != 1.0 or limit < math.inf:
            out = grad if self._sum.owns(grad) else self._scaled[: stop - start]  # in place: one tile less in cache
            grad = torch.mul(grad, scale, out=out)
        if limit < math.inf:
            grad.clamp_(-limit, limit)
        master = memory.master[start:stop]
        self._adam(memory, master, grad, segment, start, stop)
        if memory.params is not None:
            self._publish(memory.params[start:stop], master)

    def _publish(self, params: Tensor, master: Tensor) -> None:
        """Round a tile's master into the published parameters, of the master's device or the host."""
        if params.device != master.device and params.dtype is not master.dtype:
            if self._rounded is None or self._rounded.dtype is not params.dtype:
                self._rounded = torch.empty_like(self._scaled, dtype=params.dtype)
            master = self._rounded[: params.numel()].copy_(master)
        params.copy_(master, non_blocking=True)

    def _adam(self, memory: AdamMemory, master: Tensor, grad: Tensor, segment: Segment, start: int, stop: int) -> None:
        kept = {kind: state.read(start, stop) for kind, state in memory.states.items()}
        mean, square, step = kept["exp_avg"], kept["exp_avg_sq"], self._step.fill_(segment.step)
        largest = [kept["max_exp_avg_sq"]] if "max_exp_avg_sq" in kept else []
        fused_adam(segment.options, [master], [grad], [mean], [square], largest, [step])
        if memory.is_coded:  # these are copies
            memory.states["exp_avg"].write(start, stop, mean)
            memory.states["exp_avg_sq"].write(start, stop, square)


class SideStream:
    """A stream for updates on a CUDA device, so that they do not wait for the work that the rank has queued."""

    def __init__(self, device: torch.device | None) -> None:
        """``device``: None, or a device that is not CUDA, means that there is no stream."""
        on_cuda = device is not None and device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_cuda else None  # type: ignore[no-untyped-call]

    @contextmanager
    def used(self) -> Iterator[None]:
        """Work that is queued inside this context runs on the stream and is done at the end. Any thread may use it; it
        is on the stream's device meanwhile, and sleeps at the end."""
        if self._stream is None:
            yield
            return
        with on_device(self._stream.device):
            with torch.cuda.stream(self._stream):
                yield
            sleep_until_done(self._stream)
