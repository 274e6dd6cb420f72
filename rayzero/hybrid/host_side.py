"""The host side: gradients arrive in buckets, a worker thread updates them, and parameters go back.

::

    backward     send ──────▶ gradients land ─▶ (in_backward="step": update)
    step()       send the rest ─▶ update, bucket by bucket, in the order of first use in the last forward ─▶ bring
    first use    wait for the bucket

[Note: what was sent] A copy of a gradient is valid until ``.grad`` is another tensor or torch has counted a write to it
(``_version``). After accumulation, clipping or ``mul_``, ``step()`` therefore sends it again.

[Note: streams of a bucket] A model may compute on several streams, and one bucket may have parameters that different
streams use. Autograd runs the hook of a gradient on the stream where its parameter was first used in the forward. So a
bucket leaves after the work so far of every stream that one of its hooks ran on. A bucket opens as a whole at its first
use, and nobody sees which streams use its parameters after that: some have waited for the caller's stream before, and
will not do so again. So the thread waits for the copy, which is then over for all of them. It has had to wait for the
update before, and the copy of one bucket is short beside that.

[Note: staging] On a device with streams, many small gradients are gathered in device memory and copied as one;
parameters come back the same way. That memory is allocated and used on a single stream, so the allocator can give one
bucket's memory to the next without waiting: there is about one bucket of it per direction.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from rayzero.errors import UnsupportedError
from rayzero.hybrid.buckets import Bucket, Rule, range_of
from rayzero.hybrid.placement import HyperLink, Piece
from rayzero.lanes import Event, Lane
from rayzero.tensor_metadata import plain


def send(lane: Lane, bucket: Bucket, indices: Sequence[int], grads: Sequence[Tensor], after: Sequence[Event]) -> Event:
    """Copy gradients into the bucket's gradient memory, once all in ``after`` has happened. ``grads[i]`` is on the
    device and has the shape of piece ``indices[i]``; indices ascend."""
    found, landing = list(grads), bucket.grads
    assert landing is not None
    targets = [bucket.grad_views[index] for index in indices]

    def copy() -> None:
        with plain():
            if len(found) == 1 or lane.device.type != "cuda":
                torch._foreach_copy_(targets, found, non_blocking=True)  # one call: models have thousands
                return
            start, stop = _range(bucket, indices)
            staged = torch.zeros(stop - start, dtype=landing.dtype, device=lane.device)
            torch._foreach_copy_(_within(bucket, indices, staged, start, found), found)
            landing[start:stop].copy_(staged, non_blocking=True)

    return lane.issue("out", copy, after=after, holds=grads)  # zero_grad() may drop them before it has run


def bring(lane: Lane, bucket: Bucket, indices: Sequence[int], params: Sequence[Tensor], after: Event) -> Event:
    """Copy the pieces' values from ``bucket.params`` into ``params``, once ``after`` has happened."""
    targets, sources = list(params), [bucket.param_views[index] for index in indices]

    def copy() -> None:
        with plain():
            if len(targets) == 1 or lane.device.type != "cuda":
                torch._foreach_copy_(targets, sources, non_blocking=True)
                return
            start, stop = _range(bucket, indices)
            staged = bucket.params[start:stop].to(lane.device, non_blocking=True)
            torch._foreach_copy_(targets, _within(bucket, indices, staged, start, targets))

    return lane.issue("in", copy, after=[after], holds=params)  # a model may be dropped before it has run


def _range(bucket: Bucket, indices: Sequence[int]) -> tuple[int, int]:
    last = indices[-1]
    return bucket.offsets[indices[0]], bucket.offsets[last] + bucket.pieces[last].numel


def _within(
    bucket: Bucket, indices: Sequence[int], staged: Tensor, start: int, shaped: Sequence[Tensor]
) -> list[Tensor]:
    """Views of the pieces in ``staged``, which begins at element ``start`` of the bucket."""
    begins = [bucket.offsets[index] - start for index in indices]
    return [staged[at : at + like.numel()].view(like.shape) for at, like in zip(begins, shaped, strict=True)]


class Inline(Executor):
    """Runs what is submitted at once, in the caller."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run ``fn`` now; the future that is returned is done."""
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:  # raised again by the future's result()
            future.set_exception(error)
        return future


class BucketRun:
    """One bucket, its optimizer, and the copies and update that are in flight.

    Knows the bucket's parameters and gradients of this step; not other buckets."""

    def __init__(self, bucket: Bucket, rule: Rule, link: HyperLink, params: Sequence[Tensor], lane: Lane) -> None:
        """``params``: the parameter of each piece. ``lane``: copies to and from their device."""
        self.bucket, self.rule, self.link, self.params, self.lane = bucket, rule, link, tuple(params), lane
        self.arrived: dict[int, Hashable] = {}  # parameter (id) whose gradient is complete -> the stream it arrived on
        self.wanted = {id(param) for param in params}
        self.sent: dict[int, tuple[Tensor, int]] = {}  # piece -> the gradient that was copied, its version then
        self.sends: list[Event] = []  # copies that may still read gradients; freed by: finish()
        self.scales: list[float] = []  # factors that the gradients were multiplied by since they were sent
        self.present: list[int] = []  # pieces of the running update, ascending
        self.update: Future[None] | None = None  # in flight; freed by: finish()
        self.back: Future[Event] | None = None  # in flight; freed by: finish()

    def current(self, index: int, grad: Tensor) -> bool:
        """Whether the copy of ``grad`` that was sent is still valid. See [Note: what was sent]."""
        copied = self.sent.get(index)
        return copied is not None and copied[0] is grad and copied[1] == grad._version

    def forget(self) -> None:
        """Invalidate every copy."""
        self.sent.clear()
        self.scales.clear()
        self.arrived.clear()


class HostSide:
    """All buckets of one optimizer, and the worker thread that updates them.

    Knows the order of updates; not parameter groups, modules, or when a step begins."""

    def __init__(self, runs: Sequence[BucketRun], *, threads: bool) -> None:
        """``threads=False``: updates run in the caller."""
        self.runs = list(runs)
        self._worker: Executor = ThreadPoolExecutor(1, "rayzero-hybrid-adam") if threads else Inline()
        self._runs_of: dict[int, list[BucketRun]] = {}
        for run in runs:
            for param in run.wanted:
                self._runs_of.setdefault(param, []).append(run)
        self.busy_s = 0.0  # seconds that updates took since the last take_times()
        self.stall_s = 0.0  # seconds that callers waited for parameters in the same time

    # ---- gradients

    def arrive(self, param: Tensor) -> list[BucketRun]:
        """A gradient is complete, on the caller's stream. Sends the buckets that it completes, and returns them."""
        complete = []
        for run in self._runs_of.get(id(param), ()):
            run.arrived[id(param)] = run.lane.stream()
            if run.arrived.keys() == run.wanted:
                self.send(run)
                complete.append(run)
        return complete

    def runs_of(self, param: Tensor) -> Sequence[BucketRun]:
        """The buckets that have pieces of ``param``."""
        return self._runs_of.get(id(param), ())

    def stale(self, run: BucketRun) -> tuple[dict[int, Tensor], list[int]]:
        """(piece -> its gradient, for pieces that have one; those of them whose copy is missing or no longer valid)."""
        grads = [gradient_of(param) for param in run.params]
        found = {index: grad for index, grad in enumerate(grads) if grad is not None}
        return found, [index for index, grad in found.items() if not run.current(index, grad)]

    def send(self, run: BucketRun) -> list[int]:
        """Send every gradient that has no valid copy; returns the pieces that have a gradient. See [Note: streams of a
        bucket]."""
        found, stale = self.stale(run)
        streams = {*run.arrived.values(), run.lane.stream()}
        present = list(found)
        dtype = _common_dtype(found.values())
        if stale and (run.scales or run.bucket.grads is None or run.bucket.grads.dtype is not dtype):
            run.forget()  # earlier copies were scaled, or lie in memory that is about to be replaced
            stale = present
            for copy in run.sends:
                copy.join()
            run.bucket.gradient_memory(dtype)
        if stale:
            pieces = [_sent_range(found[index], run.bucket.pieces[index]) for index in stale]
            computed = [run.lane.now(stream) for stream in streams]
            run.sends.append(send(run.lane, run.bucket, stale, pieces, computed))
            run.sent |= {index: (found[index], found[index]._version) for index in stale}
        return present

    def rescale(self, scale: float, multiply: Callable[[], None]) -> None:
        """Call ``multiply``, which multiplies all gradients by ``scale`` in place, and scale their valid copies too."""
        self.wait_sent()
        counting = [run for run in self.runs if run.sent and not self.stale(run)[1]]
        multiply()
        for run in self.runs:
            if run not in counting:
                run.forget()
                continue
            run.sent = {index: (grad, grad._version) for index, (grad, _) in run.sent.items()}
            run.scales.append(scale)

    def wait_sent(self) -> None:
        """Make what the caller does next to gradients wait until they are copied, those of running updates included."""
        for run in self.runs:
            for copy in run.sends:
                copy.wait()

    def forget(self) -> None:
        """Gradients were dropped, or changed in a way torch does not count: every copy is invalid."""
        for run in self.runs:
            run.forget()

    # ---- updates

    def start_update(self, run: BucketRun, present: Sequence[int]) -> None:
        """Queue the bucket's update for the worker."""
        run.present = list(present)
        run.update = self._worker.submit(self._update, run, list(run.sends), list(run.scales))

    def _update(self, run: BucketRun, sends: Sequence[Event], scales: Sequence[float]) -> None:
        for copy in sends:
            if (error := copy.join()) is not None:
                raise error
        begin = time.perf_counter()
        run.rule.update(run.present, scales)
        self.busy_s += time.perf_counter() - begin

    def start_return(self, run: BucketRun) -> None:
        """Queue the copy of updated parameters to the device, after the update and after what the caller has
        computed."""
        assert run.update is not None, "start_update() must come before start_return()"
        run.back = self._worker.submit(self._return, run, run.update, run.lane.now())

    def _return(self, run: BucketRun, update: Future[None], after: Event) -> Event:
        update.result()
        with torch.no_grad():
            params = [_target(run.params[index], run, index) for index in run.present]
        return bring(run.lane, run.bucket, run.present, params, after)

    def finish(self, run: BucketRun) -> None:
        """Wait until the bucket's parameters are on the device, whichever stream uses them next: see [Note: streams of
        a bucket]. Raises the error of its update or copies."""
        assert run.back is not None, "no update is in flight"
        begin = time.perf_counter()
        copied = run.back.result()
        copied.wait()  # raises the copy's error, and refuses a capture
        copied.join()
        self.stall_s += time.perf_counter() - begin
        run.back = run.update = None
        run.present = []
        run.sends = []  # the update waited for these copies

    def take_times(self) -> tuple[float, float]:
        """(seconds that updates took, seconds that callers waited) since the last call."""
        found = self.busy_s, self.stall_s
        self.busy_s = self.stall_s = 0.0
        return found

    def close(self) -> None:
        """Finish queued work and end the thread. Idempotent."""
        self._worker.shutdown(wait=True)


def _sent_range(grad: Tensor, piece: Piece) -> Tensor:
    """``range_of`` a gradient; the gradient itself if the piece is whole and it has no graph, which saves a call
    each."""
    return grad if piece.whole and not grad.requires_grad else range_of(grad, piece)


def _target(param: Tensor, run: BucketRun, index: int) -> Tensor:
    """The parameter's memory, to write to. A closed parameter's class would make the write wait for itself."""
    with plain():
        return range_of(param, run.bucket.pieces[index])


def _common_dtype(grads: Iterable[Tensor]) -> torch.dtype:
    dtypes = {grad.dtype for grad in grads}
    return dtypes.pop() if len(dtypes) == 1 else torch.float32


def gradient_of(param: Tensor) -> Tensor | None:
    """The gradient to update ``param`` by: ``decoupled_grad`` if a framework set one, else ``grad``.

    Raises UnsupportedError if it is not dense."""
    found: Tensor | None = getattr(param, "decoupled_grad", None)
    found = param.grad if found is None else found
    if found is not None and found.layout is not torch.strided:
        raise UnsupportedError(
            f"a gradient of shape {tuple(found.shape)} is {found.layout}: offloaded gradients are dense; "
            "use sparse=False"
        )
    return found
