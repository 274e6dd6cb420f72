"""Activation offload for a torch module: scopes, hooks, and the two ends of every saved tensor.

The path of one saved tensor: ``_pack`` (autograd saves it inside a group) -> ``Unload`` (the group is committed: keep
or send) -> ``Reload`` (a later group's backward begins: fetch) -> ``_unpack`` (its own backward reads it) -> ``_drain``
(its graph node is gone: free)."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.autograd.graph import saved_tensors_hooks

from rayzero.activations.attach import Attachment
from rayzero.activations.cost import Choice, CostBook, CostPlan
from rayzero.activations.entry import End, Entries, KeptTensor, ProtectedStorages, Saved, view_bytes
from rayzero.activations.group import ChunkOrder, Group, OffloadPolicy
from rayzero.activations.host_pool import HostPool
from rayzero.activations.ledger import Ledger, RankSummary
from rayzero.activations.moves import Chunks, Reload, Unload
from rayzero.activations.shelf import Shelf
from rayzero.errors import ConfigError
from rayzero.lanes import GraphMarks, Lane, Span, make_lane
from rayzero.modes import outside_modes
from rayzero.telemetry.recorder import NullRecorder, Recorder

Hooks = tuple[Any, Any]  # pack, unpack
_PLAIN = (Tensor, nn.Parameter, FakeTensor)  # fake ones: a model that is planned


class WeightHooks(Protocol):
    """An engine whose parameters come and go, as offload sees it.

    It keeps some of the tensors that autograd saves, and at times has its own saved-tensor hooks on the stack."""

    def pack(self, saved: Tensor) -> object | None:
        """What autograd keeps in place of ``saved``; None if ``saved`` is not one of the engine's tensors."""
        ...

    def unpack(self, packed: Any) -> Tensor:
        """The inverse of ``pack``."""
        ...

    def below(self, hooks: Hooks) -> tuple[bool, Hooks | None]:
        """Whether these hooks are the engine's, and if so, the hooks to which they pass other tensors."""
        ...


class PackHook:
    """Autograd calls this for each tensor saved inside ``group``. Its type tells that the hook is ours."""

    __slots__ = ("group", "offload")

    def __init__(self, offload: ActivationOffload, group: Group) -> None:
        self.offload, self.group = offload, group

    @outside_modes
    def __call__(self, tensor: Tensor) -> object:
        return self.offload._pack(self.group, tensor)


class GroupScope:
    """An open group. If offload does not apply, ``group`` is None and the scope does nothing."""

    def __init__(self, offload: ActivationOffload, group: Group | None, hooks: saved_tensors_hooks | None) -> None:
        self._offload, self.group, self._hooks = offload, group, hooks

    @outside_modes
    def commit(self, *, release: list[Tensor] | None = None, delay: bool = False) -> None:
        """Decide which of the group's tensors leave, and start their copies. A second commit changes nothing.

        ``release``: tensors, of any shape and dtype, that the caller no longer needs. The list is emptied, so that its
        references do not hold their memory. Only what nobody else holds is freed; the rest counts as ``refused_bytes``.
        ``delay``: inside ``delayed()``, put the commit off to ``flush_delayed()``."""
        self.close()
        if self.group is not None:
            self._offload._commit_or_delay(self.group, release, delay)
        elif release is not None:
            release.clear()

    @outside_modes
    def close(self) -> None:
        """End the scope without deciding. What was saved stays on the device until ``commit``. Idempotent."""
        hooks, self._hooks = self._hooks, None
        if hooks is not None:
            hooks.__exit__(None, None, None)
        if self.group is not None:
            self._offload._close_group(self.group)


class ActivationOffload:
    """Moves saved-for-backward tensors of chosen scopes to host memory and back.

    Each instance has its own lane, pool and state, so several can work side by side. Knows when tensors are saved,
    read and freed; not what leaves (``Unload``), what comes back next (``Reload``), or how bytes move (``Shelf``)."""

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        policy: OffloadPolicy | None = None,
        *,
        offload_modules: Sequence[str] | Mapping[str, str] = (),
        delay_groups: Sequence[str] = (),
        lane: Lane | None = None,
        pool: HostPool | None = None,
        recorder: Recorder | None = None,
        weights: WeightHooks | None = None,
    ) -> None:
        """``model``: the module, or one per virtual pipeline stage in forward order. Its parameters and buffers never
        leave. ``offload_modules``: patterns of submodule names ("layers.*.mlp"), or group name -> pattern; hooks make
        each match a group. ``delay_groups``: names of groups whose commit waits inside ``delayed()``. ``lane``,
        ``pool``: by default, a lane of the parameters' device and a pool with the policy's caps. ``weights``: keeps
        saved weights, if an engine's parameters come and go.

        Raises ConfigError if there is no model or a pattern matches nothing, UnsupportedError if a match is inside a
        compiled module."""
        self.policy = policy or OffloadPolicy()
        models = [model] if isinstance(model, nn.Module) else list(model)
        if not models:
            raise ConfigError("activation offload needs a model, or one module per virtual stage; got none")
        self._lane = lane or _lane_for(models)
        self._pool = pool or HostPool(
            cap_bytes=self.policy.host_cap_bytes,
            pinned_cap_bytes=self.policy.pinned_cap_bytes,
            pinned_for=self._lane.device if self._lane.device.type == "cuda" else None,
            poison=self.policy.poison,
        )
        self._ledger = Ledger(recorder or NullRecorder())
        self._shelf = Shelf(self._lane, self._pool, self._ledger, self.policy)
        self._order = ChunkOrder()
        self._book = CostBook(self.policy, self._lane) if self.policy.device_budget_bytes is not None else None
        self._entries = Entries()
        self._unload = Unload(self._shelf, self._entries, self._ledger, self.policy, self._book)
        self._reload = Reload(self._shelf, self._lane, self._order, self._ledger, self.policy.prefetch)
        self._protected = ProtectedStorages(models)
        self._chunks = Chunks(self.policy, self._protected, self._order, self._reload, self._book)
        self._weights = weights
        self._lock = threading.RLock()
        self._ends: deque[End[Group]] = deque()  # handles that are gone; filled by __del__, emptied by _drain
        self._delayed: deque[tuple[Group, list[Tensor] | None]] = deque()
        self._delay_groups = frozenset(delay_groups)
        self._delaying = False
        self._enabled = True
        self.graph_marks = GraphMarks(self._lane)  # event hooks for a CUDA graph that contains groups
        self._attachment = Attachment(self, models, offload_modules)

    # ------------------------------------------------------------------------------------- scopes

    @contextmanager
    def group(self, name: str, *, commit: bool = True, delay: bool = False) -> Iterator[GroupScope]:
        """Tensors that are saved inside become one group called ``name``.

        With ``commit=False``, call ``commit()`` on the scope later. After an exception inside, everything stays on the
        device."""
        scope = self.open_group(name, name)
        try:
            yield scope
        except BaseException:
            scope.close()
            raise
        scope.close()
        if commit:
            scope.commit(delay=delay)

    @outside_modes
    def open_group(self, name: str, label: str, signature: tuple[Sequence[int], ...] = ()) -> GroupScope:
        """A scope that is open until its ``commit`` or ``close``. ``label`` tells groups of one name apart;
        ``signature``: the shapes of the inputs, which decide whether a measured cost still holds."""
        if not self._applies():
            return GroupScope(self, None, None)
        with self._lock:
            self._drain()
            group = self._chunks.current().open_group(name, label)
            group.signature = signature
            if self._book is not None and not self._lane.capturing():  # what is captured has no time
                group.began = self._lane.now()
        hooks = saved_tensors_hooks(PackHook(self, group), self._unpack)
        hooks.__enter__()
        return GroupScope(self, group, hooks)

    @contextmanager
    def chunk(self, stage: int = 0) -> Iterator[None]:
        """One forward of model part ``stage``. The constructor's modules call this by themselves."""
        self.begin_chunk(stage)
        try:
            yield
        finally:
            self.end_chunk()

    def mark_not_offloadable(self, *tensors: Tensor) -> None:
        """Keep these tensors' storages on the device as long as they live. Tensors may have any shape and dtype."""
        for tensor in tensors:
            self._protected.mark(tensor)

    # ------------------------------------------------------------------------------------- switches

    def offload_all(self, on: bool) -> None:
        """Offload everything eligible from the next chunk on, or again ``policy.fraction`` of it. Values stay exactly
        as they are, unless ``policy.compress`` rounds. With ``device_budget_bytes``, cost still decides."""
        with self._lock:
            self._chunks.all = on

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Offload nothing inside this context."""
        before, self._enabled = self._enabled, False
        try:
            yield
        finally:
            self._enabled = before

    @contextmanager
    def delayed(self) -> Iterator[None]:
        """Inside, commits of ``delay_groups`` wait for ``flush_delayed()``, or at the latest for the end of this
        context."""
        before, self._delaying = self._delaying, True
        try:
            yield
        finally:
            self._delaying = before
            if not before:
                self.flush_delayed()

    @outside_modes
    def flush_delayed(self) -> int:
        """Commit what was delayed, in forward order. Returns how many groups."""
        flushed = 0
        while self._delayed:
            group, release = self._delayed.popleft()
            self._commit(group, release)
            flushed += 1
        return flushed

    # ------------------------------------------------------------------------------------- CUDA graphs

    @outside_modes
    def prepare_capture(self, forwards: int = 1) -> None:
        """Make host buffers for ``forwards`` forwards that will be captured before their graphs are gone, each like the
        largest of the steps so far: a capture cannot make them. Call it after a step without graphs, with the streams
        and shapes of the capture. Waits for all copies."""
        if type(forwards) is not int or forwards < 1:
            raise ConfigError(f"forwards is {forwards!r}; pass a whole number >= 1")
        with self._lock:
            self._drain()
            self._lane.drain("out")
            self._lane.drain("in")
            self._pool.reserve(forwards)

    def release_graph_buffers(self) -> None:
        """Give the host buffers of captured graphs back to the pool. Call it when those graphs are gone, and the device
        has ended what was launched of them (``torch.cuda.synchronize()``)."""
        self._shelf.release_graph_leases()

    # ------------------------------------------------------------------------------------- read-outs

    def trim(self, keep_bytes: int = 0) -> int:
        """Give free host buffers back to the system, down to ``keep_bytes``. Returns how many bytes it gave back."""
        with self._lock:
            self._drain()
            return self._pool.trim(keep_bytes)

    def summary(self) -> RankSummary:
        """This rank's totals since the start. ``ledger.gather`` collects those of all ranks."""
        with self._lock:
            self._drain()
            return RankSummary(
                rank=self.policy.rank,
                groups=self._ledger.totals(),
                device_bytes=self._ledger.device_bytes,
                peak_device_bytes=self._ledger.peak_device_bytes,
                host=asdict(self._pool.status()),
            )

    def reset_peak(self) -> None:
        """Let ``peak_device_bytes`` start again from the present bytes."""
        self._ledger.reset_peak()

    def spans(self) -> list[Span]:
        """The latest copies: when each began and ended, and how many bytes it moved."""
        return self._lane.spans()

    def plan(self, stage: int = 0) -> CostPlan | None:
        """The present cost plan of a model part; None without a budget or before the first plan."""
        return self._book.plans.get(stage) if self._book is not None else None

    # ------------------------------------------------------------------------------------- end

    def remove(self) -> None:
        """Take all hooks off the model. Tensors that have left still come back."""
        self._attachment.remove()

    def close(self) -> None:
        """``remove()``, commit what was delayed, and close the lane. Graphs that still exist can run their backward."""
        self.remove()
        self.flush_delayed()
        self._lane.close()

    def __enter__(self) -> ActivationOffload:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ------------------------------------------------------------------------------------- chunks

    @outside_modes
    def begin_chunk(self, stage: int) -> None:
        """A forward of part ``stage`` starts. The constructor's modules call this by themselves."""
        if torch._C._current_graph_task_id() != -1:
            return  # torch.utils.checkpoint recomputes a forward
        with self._lock:
            self._drain()
            self._chunks.begin(stage)

    @outside_modes
    def end_chunk(self) -> None:
        """That forward has ended."""
        if torch._C._current_graph_task_id() != -1:
            return
        with self._lock:
            self._chunks.end()
            self._drain()

    # ------------------------------------------------------------------------------------- forward

    def planned_recompute(self, group: Group) -> bool:
        """Whether the cost plan has this group computed again in backward."""
        return self._book is not None and self._book.choice(group) is Choice.RECOMPUTE

    def _applies(self) -> bool:
        """False if nothing is saved, if somebody else's hooks are on top, and while a backward recomputes."""
        return (
            self._enabled
            and torch.is_grad_enabled()
            and not torch.compiler.is_compiling()
            and torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]
            and torch._C._current_graph_task_id() == -1
            and self._top_hooks_are_ours()
        )

    def _top_hooks_are_ours(self) -> bool:
        top: Hooks | None = torch._C._autograd._top_saved_tensors_default_hooks(False)
        passes_on = True
        while self._weights is not None and top is not None and passes_on:
            passes_on, top = self._weights.below(top)
        return top is None or (isinstance(top[0], PackHook) and top[0].offload is self)

    def _pack(self, group: Group, tensor: Tensor) -> object:
        kept = self._weights.pack(tensor) if self._weights is not None else None
        if kept is not None:
            return kept
        if not self._eligible(tensor):
            return KeptTensor(tensor)
        small = view_bytes(tensor) < self.policy.min_bytes
        saved = Saved(tensor, group, small=small, ends=self._ends)
        with self._lock:
            group.chunk.live += 1
        group.handles.append(weakref.ref(saved))
        group.streams.add(self._lane.stream())
        return saved

    def _eligible(self, tensor: Tensor) -> bool:
        """Whether it is a plain strided tensor on our device whose storage is big enough and not protected."""
        if type(tensor) not in _PLAIN or tensor.layout is not torch.strided or tensor.device != self._lane.device:
            return False
        storage = tensor.untyped_storage()
        plain = not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
        return (
            plain
            and tensor.numel() > 0
            and storage.nbytes() >= self.policy.min_bytes
            and (storage not in self._protected)
        )

    def _close_group(self, group: Group) -> None:
        if group.index < 0:
            group.chunk.close_group(group)
            if self._book is not None and group.began is not None:
                group.ended = self._lane.now()

    def _commit_or_delay(self, group: Group, release: list[Tensor] | None, delay: bool) -> None:
        if self._delaying and (delay or group.name in self._delay_groups):
            self._delayed.append((group, release))
        else:
            self._commit(group, release)

    def _commit(self, group: Group, release: list[Tensor] | None = None) -> None:
        with self._lock:
            self._drain()
            if group.committed:
                return
            group.committed = True
            for stream in group.streams - {self._lane.stream()}:
                self._lane.now(stream).wait()  # the copies come after what is computed here
            self._unload.commit(group, release)
            if self._book is not None:
                self._book.committed(group)

    # ------------------------------------------------------------------------------------- backward

    @outside_modes
    def _unpack(self, packed: object) -> Tensor:
        if isinstance(packed, KeptTensor):
            return packed.read()
        if not isinstance(packed, Saved):
            assert self._weights is not None
            return self._weights.unpack(packed)
        with self._lock, torch.no_grad():
            self._drain()
            self._note_read(packed.group)
            packed.check()
            return self._reload.read(packed)

    def _note_read(self, group: Group) -> None:
        """Notice the first read of a group in a graph task: its backward begins."""
        task = torch._C._current_graph_task_id()
        if task == -1 or group.task == task:
            return
        group.task = task
        self._close_group(group)
        self._chunks.backward_began(group.chunk)
        if self._book is not None:
            self._book.backward_began(group)
        self._reload.backward_began(group)

    # ------------------------------------------------------------------------------------- ends

    def _drain(self) -> None:
        """Free what no graph node needs any more. Every entry point calls it, because handles may end in any thread."""
        while self._ends:
            group, entry, epoch = self._ends.popleft()
            group.chunk.live -= 1
            if entry is not None and self._shelf.end(entry, epoch):
                self._entries.forget(entry)
            self._chunks.drop_if_gone(group.chunk)
        self._unload.forget_landed()


def _lane_for(models: Sequence[nn.Module]) -> Lane:
    """A lane of the first parameter's device, or of the CPU if there are no parameters."""
    first: Any = next((tensor for model in models for tensor in model.parameters()), None)
    return make_lane(first.device if first is not None else torch.device("cpu"))
