"""Opens a chunk with each forward, closes it at the end, and drops it once nothing of it is left."""

from __future__ import annotations

from dataclasses import replace

import torch

from rayzero.activations.policy import OffloadPolicy
from rayzero.activations.schedule.chunk_order import ChunkOrder
from rayzero.activations.schedule.cost_book import CostBook
from rayzero.activations.schedule.group import Chunk, ChunkQuota
from rayzero.activations.schedule.moves import Reload
from rayzero.activations.tensors.protected_storages import ProtectedStorages


class Chunks:
    """The chunk whose forward runs, if any, and the beginning and end of every chunk.

    Knows forwards, and who needs to hear of a chunk (the order, the reload, the cost book); not what is saved, or who
    moves it. Called under the offload's lock."""

    def __init__(
        self,
        policy: OffloadPolicy,
        protected: ProtectedStorages,
        order: ChunkOrder,
        reload: Reload,
        book: CostBook | None,
    ) -> None:
        self._policy, self._protected = policy, protected
        self._order, self._reload, self._book = order, reload, book
        self.all = False  # whether chunks offload all eligible bytes, whatever the policy's fraction
        self._current: Chunk | None = None
        self._depth = 0  # running forwards of models, one inside the other
        self._last_bytes: dict[int, tuple[int, ...]] = {}  # stage -> those of the last chunk's groups

    def begin(self, stage: int) -> None:
        """A forward of part ``stage`` starts. Inside another forward, or without gradients, it opens no chunk."""
        self._depth += 1
        if self._depth == 1 and torch.is_grad_enabled():
            self._close()
            self._open_new(stage)

    def end(self) -> None:
        """That forward has ended."""
        self._depth = max(0, self._depth - 1)
        if self._depth == 0:
            self._close()

    def current(self) -> Chunk:
        """The open chunk, or a new one for groups outside any forward of the model."""
        return self._current if self._current is not None else self._open_new(0)

    def backward_began(self, chunk: Chunk) -> None:
        """Something of ``chunk`` is read. If its groups were outside any forward, this closes it."""
        if self._current is chunk and self._depth == 0:
            self._close()

    def drop_if_gone(self, chunk: Chunk) -> None:
        """Forget a chunk if nothing of it is left."""
        if not chunk.gone or chunk not in self._reload.live_chunks():
            return
        self._reload.chunk_gone(chunk)
        self._order.gone(chunk.key)
        if self._book is not None:
            self._book.chunk_gone(chunk)

    def _open_new(self, stage: int) -> Chunk:
        self._protected.refresh()
        key = self._order.forward_began(stage)
        margin = self._policy.margin if self._order.comes_next(key) else 0
        policy = replace(self._policy, fraction=1.0) if self.all else self._policy
        chunk = Chunk(key, ChunkQuota(policy, self._last_bytes.get(stage), margin=margin))
        self._current = chunk
        self._reload.chunk_began(chunk)
        if self._book is not None:
            self._book.chunk_began(self._reload.num_chunks)
        return chunk

    def _close(self) -> None:
        chunk, self._current = self._current, None
        if chunk is None:
            return
        chunk.forward_open = False
        self._order.forward_ended(chunk.key)
        sizes = tuple(group.saved_bytes for group in chunk.groups)
        if any(sizes):
            self._last_bytes[chunk.key.stage] = sizes
        self.drop_if_gone(chunk)
