"""Activation offload for a torch module: scopes, hooks, and the two ends of every saved tensor.

The path of one saved tensor: ``_pack`` (autograd saves it inside a group) -> ``_commit`` (the group's scope ends: keep
or send) -> ``Reload`` (a later group's backward begins: fetch) -> ``_unpack`` (its own backward reads it) -> ``_drain``
(its graph node is gone: free)."""

from __future__ import annotations

import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from rayzero.activations.attach import Attachment
from rayzero.activations.chunk_order import ChunkOrder
from rayzero.activations.copy_lane import CopyLane, Span, ThreadLane
from rayzero.activations.cost import Choice, CostPlan
from rayzero.activations.cost_book import CostBook
from rayzero.activations.cuda_lane import CudaLane
from rayzero.activations.elsewhere import Elsewhere, Hooks
from rayzero.activations.entry import Entry, Place, Shelf, alive, in_place, shown, source_of
from rayzero.activations.graph_marks import GraphMarks
from rayzero.activations.group import Chunk, Group
from rayzero.activations.host_pool import HostPool, PoolStatus
from rayzero.activations.ledger import GroupTotals, Ledger
from rayzero.activations.pieces import Piece, plan_pieces
from rayzero.activations.policy import OffloadPolicy
from rayzero.activations.protect import Protected
from rayzero.activations.quota import ChunkBytes, ChunkQuota
from rayzero.activations.reload import Reload
from rayzero.activations.saved import Held, Saved
from rayzero.activations.summary import RankSummary
from rayzero.errors import ConfigError, RayZeroError
from rayzero.telemetry.recorder import NullRecorder, Recorder

_PLAIN = (Tensor, nn.Parameter)


class PackHook:
    """What autograd calls for a tensor saved inside ``group``; known to be ours by its type."""

    __slots__ = ("group", "offload")

    def __init__(self, offload: ActivationOffload, group: Group) -> None:
        self.offload, self.group = offload, group

    def __call__(self, tensor: Tensor) -> object:
        return self.offload._pack(self.group, tensor)


class GroupScope:
    """An open group, or nothing at all where offload does not apply (``group`` is None)."""

    def __init__(self, offload: ActivationOffload, group: Group | None, hooks: saved_tensors_hooks | None) -> None:
        self._offload, self.group, self._hooks = offload, group, hooks

    def commit(self, *, release: list[Tensor] | None = None, delay: bool = False) -> None:
        """Decide on the group's tensors and start them on their way; a second commit changes nothing.

        ``release`` hands over tensors that the caller is done with: the list is emptied, so that its references do
        not hold their memory. Only what nobody else holds is freed; the rest is counted as ``refused_bytes``.
        ``delay``: inside ``delayed()`` the commit is put off to ``flush_delayed()``."""
        self.close()
        if self.group is not None:
            self._offload._commit_or_delay(self.group, release, delay)
        elif release is not None:
            release.clear()

    def close(self) -> None:
        """End the scope without deciding; what was saved stays until ``commit``. Idempotent."""
        hooks, self._hooks = self._hooks, None
        if hooks is not None:
            hooks.__exit__(None, None, None)
        if self.group is not None:
            self._offload._close_group(self.group)


class ActivationOffload:
    """Moves saved-for-backward tensors of chosen scopes to host memory and back.

    One instance has its own lane, pool and state; several can work side by side. Knows when tensors are saved, read
    and freed; how bytes move is the shelf's affair, what comes back next is ``Reload``'s."""

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        policy: OffloadPolicy | None = None,
        *,
        offload_modules: Sequence[str] | Mapping[str, str] = (),
        delay_groups: Sequence[str] = (),
        lane: CopyLane | None = None,
        pool: HostPool | None = None,
        recorder: Recorder | None = None,
        elsewhere: Elsewhere | None = None,
    ) -> None:
        """``model``: the module, or one per virtual pipeline stage in forward order; its parameters and buffers never
        leave. ``offload_modules``: patterns of submodule names ("layers.*.mlp"), or group name -> pattern; each match
        becomes a group by hooks. ``delay_groups``: names of groups whose commit waits inside ``delayed()``.
        ``elsewhere``: who keeps saved weights, where parameters come and go."""
        self.policy = policy or OffloadPolicy()
        models = [model] if isinstance(model, nn.Module) else list(model)
        if not models:
            raise ConfigError("activation offload needs a model, or one module per virtual stage; got none")
        self._lane = lane or _lane_for(models)
        self._pool = pool or HostPool(
            cap_bytes=self.policy.host_cap_bytes,
            pinned_cap_bytes=self.policy.pinned_cap_bytes,
            pin=self._lane.pins,
            poison=self.policy.poison,
        )
        self._ledger = Ledger(recorder or NullRecorder())
        self._shelf = Shelf(self._lane, self._pool, self._ledger, self.policy)
        self._order = ChunkOrder()
        self._reload = Reload(self._shelf, self._order, self._ledger, self.policy.prefetch)
        self._book = CostBook(self.policy, self._lane) if self.policy.device_budget_bytes is not None else None
        self._protected = Protected(models)
        self._elsewhere = elsewhere
        self._lock = threading.RLock()
        self._ends: deque[Saved.End] = deque()  # handles that are gone; filled by __del__, emptied by _drain
        self._entries: dict[int, list[Entry]] = {}  # storage address -> entries saved from it
        self._last_bytes: dict[int, ChunkBytes] = {}  # stage -> the last chunk's
        self._flying: deque[list[Entry]] = deque()  # groups on their way out, oldest first
        self._delayed: deque[tuple[Group, list[Tensor] | None]] = deque()
        self._delay_groups = frozenset(delay_groups)
        self._delaying = False
        self._enabled = True
        self._chunk: Chunk | None = None
        self._chunk_depth = 0
        self._graph_marks = GraphMarks(self._lane)
        self._attachment = Attachment(self, models, offload_modules)

    # ------------------------------------------------------------------------------------- scopes

    @contextmanager
    def group(self, name: str, *, commit: bool = True, delay: bool = False) -> Iterator[GroupScope]:
        """Tensors saved inside become one group called ``name``.

        With ``commit=False`` call ``commit()`` on the scope later. An exception inside leaves everything on the
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

    def open_group(self, name: str, label: str, signature: tuple[Sequence[int], ...] = ()) -> GroupScope:
        """A scope that is open until its ``commit`` or ``close``; ``label`` tells groups of one name apart."""
        if not self._applies():
            return GroupScope(self, None, None)
        with self._lock:
            self._drain()
            group = self._current_chunk().open_group(name, label)
            group.signature = signature
            if self._book is not None:
                group.began = self._lane.stamp()
        hooks = saved_tensors_hooks(PackHook(self, group), self._unpack)
        hooks.__enter__()
        return GroupScope(self, group, hooks)

    @contextmanager
    def chunk(self, stage: int = 0) -> Iterator[None]:
        """One forward of model part ``stage``; modules given to the constructor do this by themselves."""
        self._begin_chunk(stage)
        try:
            yield
        finally:
            self._end_chunk()

    def mark_not_offloadable(self, *tensors: Tensor) -> None:
        """These tensors' storages stay on the device, as long as they live."""
        for tensor in tensors:
            self._protected.mark(tensor)

    # ------------------------------------------------------------------------------------- switches

    @property
    def enabled(self) -> bool:
        """False between ``disable()`` and ``enable()``: groups are passed through then."""
        return self._enabled

    def enable(self) -> None:
        """Offload from the next group on."""
        self._enabled = True

    def disable(self) -> None:
        """Pass groups through; what is away comes back as ever."""
        self._enabled = False

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """``disable()`` inside."""
        before, self._enabled = self._enabled, False
        try:
            yield
        finally:
            self._enabled = before

    @contextmanager
    def delayed(self) -> Iterator[None]:
        """Inside, commits of ``delay_groups`` wait until ``flush_delayed()``, at the latest the end of this block."""
        before, self._delaying = self._delaying, True
        try:
            yield
        finally:
            self._delaying = before
            if not before:
                self.flush_delayed()

    def flush_delayed(self) -> int:
        """Commit what was delayed, in forward order; how many groups."""
        flushed = 0
        while self._delayed:
            group, release = self._delayed.popleft()
            self._commit(group, release)
            flushed += 1
        return flushed

    # ------------------------------------------------------------------------------------- CUDA graphs

    @property
    def graph_marks(self) -> GraphMarks:
        """Event hooks for a CUDA graph that contains groups."""
        return self._graph_marks

    def release_graph_buffers(self) -> None:
        """Host buffers of captured graphs go back to the pool: call it when those graphs are gone."""
        self._shelf.release_graph_leases()

    # ------------------------------------------------------------------------------------- read-outs

    def pool_status(self) -> PoolStatus:
        """Host memory now."""
        with self._lock:
            self._drain()
            return self._pool.status()

    def trim(self, keep_bytes: int = 0) -> int:
        """Give free host buffers back to the system, down to ``keep_bytes``; the bytes given back."""
        with self._lock:
            self._drain()
            return self._pool.trim(keep_bytes)

    def summary(self) -> RankSummary:
        """This rank's totals since the start; ``summary.gather`` brings all ranks' together."""
        with self._lock:
            self._drain()
            return RankSummary(
                rank=self.policy.rank,
                groups=self._ledger.totals(),
                device_bytes=self._ledger.device_bytes,
                peak_device_bytes=self._ledger.peak_device_bytes,
                host=self._pool.status().as_dict(),
            )

    def reset_peak(self) -> None:
        """Start ``peak_device_bytes`` anew."""
        self._ledger.reset_peak()

    def spans(self) -> list[Span]:
        """The latest copies: when, how long, how many bytes."""
        return self._lane.spans()

    def plan(self, stage: int = 0) -> CostPlan | None:
        """The cost plan in force for a part; None without a budget or before the first is made."""
        return self._book.plans.get(stage) if self._book is not None else None

    # ------------------------------------------------------------------------------------- end

    def remove(self) -> None:
        """Take all hooks off the model. Tensors that are away still come back."""
        self._attachment.remove()

    def close(self) -> None:
        """``remove()`` and end the copy threads; graphs that still live can run their backward."""
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

    def _begin_chunk(self, stage: int) -> None:
        if torch._C._current_graph_task_id() != -1:
            return  # a checkpoint recomputes
        with self._lock:
            self._chunk_depth += 1
            if self._chunk_depth == 1 and torch.is_grad_enabled():
                self._drain()
                self._close_chunk()
                self._open_chunk(stage)

    def _end_chunk(self) -> None:
        if torch._C._current_graph_task_id() != -1:
            return
        with self._lock:
            self._chunk_depth = max(0, self._chunk_depth - 1)
            if self._chunk_depth == 0:
                self._close_chunk()
                self._drain()

    def _current_chunk(self) -> Chunk:
        """The open one, or a new one for groups used outside any forward of the model."""
        return self._chunk if self._chunk is not None else self._open_chunk(0)

    def _open_chunk(self, stage: int) -> Chunk:
        self._protected.refresh()
        key = self._order.forward_began(stage)
        margin = self.policy.margin if self._order.comes_next(key) else 0
        chunk = Chunk(key, ChunkQuota(self.policy, self._last_bytes.get(stage), margin=margin))
        self._chunk = chunk
        self._reload.chunk_began(chunk)
        if self._book is not None:
            self._book.chunk_began(self._reload.num_chunks)
        return chunk

    def _close_chunk(self) -> None:
        chunk, self._chunk = self._chunk, None
        if chunk is None:
            return
        chunk.forward_open = False
        self._order.forward_ended(chunk.key)
        if any(chunk.group_bytes()):
            self._last_bytes[chunk.key.stage] = ChunkBytes(chunk.group_bytes())
        self._drop_if_gone(chunk)

    def _drop_if_gone(self, chunk: Chunk) -> None:
        if not chunk.gone or chunk not in self._reload.live_chunks():
            return
        self._reload.chunk_gone(chunk)
        self._order.gone(chunk.key)
        if self._book is not None:
            self._book.chunk_gone(chunk)

    # ------------------------------------------------------------------------------------- forward

    def _planned_recompute(self, group: Group) -> bool:
        return self._book is not None and self._book.choice(group) is Choice.RECOMPUTE

    def _applies(self) -> bool:
        """False where nothing is saved, where others' hooks must win, and while a backward recomputes."""
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
        while self._elsewhere is not None and top is not None and passes_on:
            passes_on, top = self._elsewhere.below(top)
        return top is None or (isinstance(top[0], PackHook) and top[0].offload is self)

    def _pack(self, group: Group, tensor: Tensor) -> object:
        kept = self._elsewhere.pack(tensor) if self._elsewhere is not None else None
        if kept is not None:
            return kept
        if not self._eligible(tensor):
            return Held(tensor)
        small = _view_bytes(tensor) < self.policy.min_bytes
        saved = Saved(tensor, group, small=small, ends=self._ends)
        with self._lock:
            group.chunk.live += 1
        group.handles.append(weakref.ref(saved))
        return saved

    def _eligible(self, tensor: Tensor) -> bool:
        """A plain strided tensor on our device whose storage is big enough and not protected."""
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
            if self._book is not None:
                group.ended = self._lane.stamp()

    def _commit_or_delay(self, group: Group, release: list[Tensor] | None, delay: bool) -> None:
        if self._delaying and (delay or group.name in self._delay_groups):
            self._delayed.append((group, release))
        else:
            self._commit(group, release)

    def _commit(self, group: Group, release: list[Tensor] | None = None) -> None:
        """Decide and send, storage by storage; then hand over what is dead; then keep to the limit in flight."""
        with self._lock:
            self._drain()
            if group.committed:
                return
            group.committed = True
            found = group.waiting()
            handed = self._take_over(found, release)
            sent = [entry for same in _by_storage(found) for entry in self._commit_storage(group, same)]
            self._count_commit(group)
            for nbytes, sharing in handed:
                dead = sharing is not None and all(saved.tensor is None for saved in sharing)
                self._count(group, "released_bytes" if dead else "refused_bytes", nbytes)
            self._limit_in_flight(sent)

    def _commit_storage(self, group: Group, found: list[Saved]) -> list[Entry]:
        """Decide on the handles of one storage; the entries that were sent."""
        tensor = found[0].tensor
        assert tensor is not None
        storage = tensor.untyped_storage()
        fresh = [saved for saved in found if not self._join_existing(group, storage, saved)]
        valid = [saved for saved in fresh if saved.version == saved.probe._version]
        big = [saved for saved in valid if not saved.small]
        pieces = plan_pieces(storage.nbytes(), [saved.view for saved in big], self.policy.view_coverage) if big else []
        sent = []
        for piece in pieces:
            members = [saved for saved in valid if saved.entry is None and piece.covers(saved.view)]
            sent += [entry] if (entry := self._commit_piece(group, piece, members, storage)) is not None else []
        return sent

    def _join_existing(self, group: Group, storage: torch.UntypedStorage, saved: Saved) -> bool:
        """True when an entry already has these bytes: they are stored once."""
        for entry in self._entries.get(storage._cdata, ()):
            if entry.same_content(saved):
                self._count(group, "shared_bytes", saved.view.nbytes)
                self._attach(group, entry, saved)
                return True
        return False

    def _commit_piece(
        self, group: Group, piece: Piece, members: list[Saved], storage: torch.UntypedStorage
    ) -> Entry | None:
        """Make the piece's entry, on the device or on its way out; it if it was sent."""
        entry = Entry(piece, members, storage, group.key.label)
        first = members[0].tensor
        assert first is not None
        group.saved_bytes += piece.nbytes
        shared = sum(saved.view.nbytes for saved in members[1:])
        if shared:
            self._count(group, "shared_bytes", shared)
        take = self._share(group, piece.nbytes, entry.dtype.itemsize)
        sent = take > 0 and self._shelf.send(entry, source_of(piece, storage, first), take)
        if take and not sent:
            group.chunk.quota.put_back(take)
            self._count(group, "no_room_bytes", take)
        if sent:
            self._count_sent(group, entry, take)
        else:
            self._shelf.keep(entry)
            self._count(group, "kept_bytes", piece.nbytes)
        self._entries.setdefault(storage._cdata, []).append(entry)
        for saved in members:
            self._attach(group, entry, saved)
        return entry if sent else None

    def _attach(self, group: Group, entry: Entry, saved: Saved) -> None:
        entry.attach(saved)
        if entry not in group.entries:
            group.entries.append(entry)
        if entry.place is Place.KEPT:
            saved.entry = entry
        else:
            saved.leave(entry)

    def _share(self, group: Group, nbytes: int, itemsize: int) -> int:
        """Bytes of a piece that leave, whole elements."""
        if self._book is not None:
            return nbytes if not group.recomputed and self._book.choice(group) is Choice.OFFLOAD else 0
        taken = group.chunk.quota.take(nbytes, group=group.index)
        group.chunk.quota.put_back(taken % itemsize)
        return taken - taken % itemsize

    def _limit_in_flight(self, sent: list[Entry]) -> None:
        limit = self.policy.max_in_flight
        if limit is None or not sent:
            return
        self._flying.append(sent)
        while len(self._flying) > limit:
            for entry in self._flying.popleft():
                self._shelf.let_go(entry)

    def _take_over(self, found: Sequence[Saved], release: list[Tensor] | None) -> list[tuple[int, list[Saved] | None]]:
        """Empty the list: bytes of each tensor and the handles that share its storage; None if others hold it too.

        Proof: nobody else has the Python object, and every reference to the storage is one of these handles'."""
        handed: list[tuple[int, list[Saved] | None]] = []
        while release:
            tensor = release.pop()
            storage = tensor.untyped_storage()
            sharing = [s for s in found if s.tensor is not None and s.tensor.untyped_storage()._cdata == storage._cdata]
            alone = torch._C._storage_Use_Count(storage._cdata) <= 2 + len(sharing)
            proven = alone and sys.getrefcount(tensor) <= 2
            handed.append((_view_bytes(tensor), sharing if proven else None))
        return handed

    # ------------------------------------------------------------------------------------- backward

    def _unpack(self, packed: object) -> Tensor:
        if isinstance(packed, Held):
            return packed.read()
        if not isinstance(packed, Saved):
            assert self._elsewhere is not None
            return self._elsewhere.unpack(packed)
        with self._lock, torch.no_grad():
            self._drain()
            self._note_read(packed.group)
            packed.check()
            return self._read(packed)

    def _note_read(self, group: Group) -> None:
        """The first read of a group in a graph task: its backward begins."""
        task = torch._C._current_graph_task_id()
        if task == -1 or group.task == task:
            return
        group.task = task
        self._close_group(group)
        if self._chunk is group.chunk and self._chunk_depth == 0:
            self._close_chunk()
        if self._book is not None:
            self._book.backward_began(group)
        self._reload.backward_began(group)

    def _read(self, saved: Saved) -> Tensor:
        if saved.tensor is not None:
            self._count(saved.group, "on_device", 1)
            return saved.tensor
        entry = saved.entry
        if entry is None:
            raise RayZeroError(f"a saved tensor ({saved}) was read after it was freed")
        there = self._still_there(entry, saved)
        if there is not None:
            self._count(saved.group, "on_device", 1)
            return there
        self._await(entry, saved.group)
        return self._shelf.read(entry, saved)

    def _still_there(self, entry: Entry, saved: Saved) -> Tensor | None:
        """The tensor in memory that never went away, if there is one."""
        data = entry.resident.bytes if entry.resident is not None else None
        if data is not None:
            return shown(data, entry.piece, saved)
        storage = alive(entry) if entry.back is None else None
        return in_place(storage, saved) if storage is not None else None

    def _await(self, entry: Entry, group: Group) -> None:
        """Order the backward after the entry's return, and note how long that takes."""
        if self._shelf.fetch(entry, ahead=False):
            self._count(group, "returned_bytes", entry.piece.nbytes)
        place = entry.place
        found = "hits" if place is Place.BACK else "late"
        self._count(group, found if entry.ahead else "misses", 1)
        start = self._lane.stamp()
        self._shelf.wait(entry)
        if place is not Place.BACK:
            self._ledger.stalled(group.name, self._lane, start, self._lane.stamp())

    # ------------------------------------------------------------------------------------- ends

    def _drain(self) -> None:
        """Free what no graph node needs any more. Called on every way in; handles' ends may come from any thread."""
        while self._ends:
            group, entry, epoch = self._ends.popleft()
            group.chunk.live -= 1
            if entry is not None and self._shelf.end(entry, epoch):
                self._forget(entry)
            self._drop_if_gone(group.chunk)
        while self._flying and all(entry.place is not Place.LEAVING for entry in self._flying[0]):
            self._flying.popleft()

    def _forget(self, entry: Entry) -> None:
        cdata = entry.storage.cdata
        left = [other for other in self._entries.get(cdata, ()) if other is not entry]
        if left:
            self._entries[cdata] = left
        else:
            self._entries.pop(cdata, None)

    # ------------------------------------------------------------------------------------- counting

    def _count(self, group: Group, name: str, value: int) -> None:
        def change(totals: GroupTotals) -> None:
            setattr(totals, name, getattr(totals, name) + value)

        self._ledger.count(group.name, change)

    def _count_sent(self, group: Group, entry: Entry, take: int) -> None:
        assert entry.lease is not None
        host_bytes = entry.lease.bytes.numel()
        group.offloaded_bytes += take

        def change(totals: GroupTotals) -> None:
            totals.offloaded_bytes += take
            totals.host_bytes += host_bytes
            totals.kept_bytes += entry.piece.nbytes - take

        self._ledger.count(group.name, change)

    def _count_commit(self, group: Group) -> None:
        def change(totals: GroupTotals) -> None:
            totals.groups += group.saved_bytes > 0
            totals.saved_bytes += group.saved_bytes
            totals.recomputed += group.recomputed

        self._ledger.count(group.name, change)
        if self._book is not None:
            self._book.committed(group, **self._attachment.cost_facts(group))


def _lane_for(models: Sequence[nn.Module]) -> CopyLane:
    """The lane of the device the parameters are on; of the CPU without parameters."""
    first: Any = next((tensor for model in models for tensor in model.parameters()), None)
    device = first.device if first is not None else torch.device("cpu")
    return CudaLane(device) if device.type == "cuda" else ThreadLane(device)


def _by_storage(found: Sequence[Saved]) -> list[list[Saved]]:
    """Handles of one storage together, in the order their storages were first saved."""
    groups: dict[int, list[Saved]] = {}
    for saved in found:
        assert saved.tensor is not None
        groups.setdefault(saved.tensor.untyped_storage()._cdata, []).append(saved)
    return list(groups.values())


def _view_bytes(tensor: Tensor) -> int:
    """Bytes of the view, or of its storage if that is smaller (expanded tensors)."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
