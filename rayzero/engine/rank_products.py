"""Multiplies matrices for owners, on this rank's device, beside the training. [Note: products on ranks] in
protocol/products.py"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections import deque
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from rayzero.concurrency.futures import DONE, failed
from rayzero.concurrency.threads import use_torch_threads, with_index
from rayzero.errors import RayZeroError, StallError
from rayzero.kernels.newton_schulz import as_product, newton_schulz
from rayzero.kernels.optimizer_class import as_options
from rayzero.kernels.torch_kernel import SideStream
from rayzero.protocol.messages import Action, Hyper, ModelSpec
from rayzero.protocol.products import PRODUCT_DTYPE, matrices_of, multiplying_ranks
from rayzero.protocol.store import ParameterStore
from rayzero.telemetry.names import MATRIX_PRODUCT_SECONDS, MATRIX_PRODUCTS
from rayzero.telemetry.recorder import Recorder

log = logging.getLogger(__name__)

_Asked = tuple[int, Tensor, Future[None]]  # shard, its unit's memory, what fills it


class RankProducts:
    """A thread that computes Newton-Schulz of this rank's shards after each decided step, in forward order: while it
    computes one, the next comes.

    Knows shards and their matrices; not what an owner does with a product. What fails is left to the owner."""

    def __init__(
        self, store: ParameterStore, spec: ModelSpec, rank: int, device: torch.device, recorder: Recorder
    ) -> None:
        """The thread begins at once. Freed by: close()."""
        self._recorder = recorder
        self._store, self._spec, self._rank = store, spec, rank
        self._shards = [shard for shard, of in multiplying_ranks(spec).items() if of == rank]
        self._cuda = _CudaProducts(device) if device.type == "cuda" else None
        self._steps: SimpleQueue[tuple[int, Future[Any]] | None] = SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"rayzero-rank{rank}-products", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a program may end without closing anything, and no thread may be in torch then

    def begin(self, version: int, deciding: Future[Any]) -> None:
        """A step is committed, which makes ``version`` once it is decided."""
        if self._shards:
            self._steps.put((version, deciding))

    def close(self) -> None:
        """End the thread, after the store's calls have ended. Idempotent."""
        atexit.unregister(self.close)
        self._closed = True
        self._steps.put(None)
        self._thread.join()

    def _run(self) -> None:
        use_torch_threads(1)
        while (step := self._steps.get()) is not None and not self._closed:
            version, deciding = step
            try:
                deciding.result()
                decision = self._store.decision(version - 1).result()
                if decision.action is Action.APPLY:
                    self._multiply_all(version, decision.hyper)
            except RayZeroError as error:  # the loop's own wait for the decision raises, too
                log.debug("rank %d: step %d was not decided: %s", self._rank, version - 1, error)
            except RuntimeError as error:  # its device's, full perhaps
                log.warning("rank %d leaves products of step %d to their owners: %s", self._rank, version - 1, error)

    def _multiply_all(self, version: int, hyper: tuple[Hyper, ...]) -> None:
        options, left = [as_options(group) for group in hyper], deque(self._shards)
        coming: _Asked | None = self._ask(left.popleft(), version)
        sent: Future[None] = DONE
        while coming is not None and not self._closed:
            asked, coming = coming, self._ask(left.popleft(), version) if left else None
            sent, before = self._multiplied(asked, version, options), sent
            self._settle(before, version)  # so that no more than two are on their way
        self._settle(sent, version)

    def _settle(self, sent: Future[None], version: int) -> None:
        try:
            sent.result()
        except RayZeroError as error:
            log.debug("rank %d leaves a shard of v%d to its owner: %s", self._rank, version, error)

    def _ask(self, shard: int, version: int) -> _Asked:
        numel = self._spec.layout.units[self._spec.layout.shards[shard].unit].numel
        memory = torch.empty(numel, dtype=PRODUCT_DTYPE, device="cpu")  # only the shard's pages are used
        return shard, memory, self._store.product(shard, version, memory)

    def _multiplied(self, asked: _Asked, version: int, options: list[Hyper]) -> Future[None]:
        shard, memory, came = asked
        while True:
            try:
                came.result()
                break
            except StallError as error:  # its owner has not got there yet
                if self._closed:
                    return failed(error)
                came = self._store.product(shard, version, memory)
            except RayZeroError as error:
                return failed(error)
        cut, matrices, began = self._spec.layout.shards[shard], matrices_of(self._spec, shard), time.perf_counter()
        for matrix in matrices:
            flat = memory[cut.start + matrix.start : cut.start + matrix.stop]
            compute = newton_schulz if self._cuda is None else self._cuda
            as_product(flat, matrix.shape).copy_(compute(flat.view(matrix.shape), options[matrix.group]))
        self._recorder.add(MATRIX_PRODUCTS, len(matrices))
        self._recorder.add(MATRIX_PRODUCT_SECONDS, time.perf_counter() - began)
        return self._store.multiplied(shard, version, memory)


class _CudaProducts:
    """Computes on a CUDA device, in a stream of its own: it overlaps with the loop's kernels where these leave room."""

    def __init__(self, device: torch.device) -> None:
        self._device = with_index(device)
        self._side = SideStream(self._device)
        self._pinned = torch.empty(0, dtype=PRODUCT_DTYPE, device="cpu")  # grows to the largest matrix

    def __call__(self, matrix: Tensor, options: Hyper) -> Tensor:
        """See ``newton_schulz``; host memory in and out, which the next call overwrites."""
        if self._pinned.numel() < matrix.numel():
            self._pinned = torch.empty(matrix.numel(), dtype=PRODUCT_DTYPE, device="cpu", pin_memory=True)
        staged = self._pinned[: matrix.numel()]
        staged.view(matrix.shape).copy_(matrix)
        out = as_product(staged, (matrix.shape[0], matrix.shape[1]))
        with torch.no_grad(), self._side.used():
            product = newton_schulz(staged.view(matrix.shape).to(self._device, non_blocking=True), options)
            out.copy_(product, non_blocking=True)
        return out
