"""A backward as autograd runs it on a device with several streams, played on a simulated lane.

[Note: autograd's streams] Autograd runs a node on the stream of its forward, after the nodes that its gradients come
from (the first one: after what the caller computed), and has the allocator hold these gradients for it. Where gradients
of two nodes are added up, the stream of the node that reads them waits for each as it comes. The gradient of a leaf
arrives on the stream where the leaf was first used. In the end, the stream that is current here has waited for all
others. (``torch/csrc/autograd/engine.cpp``, ``input_buffer.cpp``, ``accumulate_grad.h``.) On the CPU autograd has no
streams: hooks on every node stand for them. A leaf that was used several times is played on the stream that is current
here, whichever it was first used on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from rayzero.lanes import Event
from tests.support.simulated_lane import SimulatedLane


def backward(lane: SimulatedLane, loss: Tensor) -> None:
    """``loss.backward()``, each node of its graph on the stream on which its forward ran. See [Note: autograd's
    streams]."""
    nodes = list(_nodes(loss.grad_fn))
    tape = _Tape(lane, nodes)
    hooks = [hook for node in nodes for hook in tape.follow(node)]
    try:
        with lane.on(str(lane.stream())):  # the tape changes this stream
            loss.backward()  # type: ignore[no-untyped-call]
    finally:
        for hook in hooks:
            hook.remove()
    for over in tape.over.values():
        over.wait()


class _Tape:
    """Which nodes a node's gradients come from, and when each of these was over."""

    def __init__(self, lane: SimulatedLane, nodes: Sequence[Any]) -> None:
        self._lane, self._home = lane, str(lane.stream())
        self._sources: dict[Any, list[int]] = defaultdict(list)  # node -> the nodes before it
        for node in nodes:
            for after, _ in node.next_functions:
                if after is not None:
                    self._sources[_key(after)].append(_key(node))
        self.over: dict[int, Event] = {}

    def follow(self, node: Any) -> Iterator[Any]:
        """Hooks that play the node's stream."""
        key = _key(node)
        stream = self._stream_of(node)
        readers = [None if after is None else (_key(after), self._stream_of(after)) for after, _ in node.next_functions]
        yield node.register_prehook(lambda gradients: self._begin(key, stream, gradients))
        yield node.register_hook(lambda gradients, _: self._end(key, readers, gradients))

    def _stream_of(self, node: Any) -> str:
        if not _is_leaf(node):
            return self._lane.made_on(node._sequence_nr())
        sources = self._sources[_key(node)]
        return self._lane.made_on(sources[0]) if len(sources) == 1 else self._home

    def _compute_on(self, stream: str) -> None:
        self._lane._leave()
        self._lane._enter(stream)

    def _begin(self, key: Any, stream: str, gradients: Sequence[Tensor | None]) -> None:
        self._compute_on(stream)
        if not self._sources[key]:
            self._lane.wait_stream(self._home)
        for source in self._sources[key]:
            if source in self.over:
                self.over[source].wait()
        self._use(gradients)

    def _end(self, key: int, readers: Sequence[tuple[Any, str] | None], gradients: Sequence[Tensor | None]) -> None:
        """Autograd adds the gradients up that have several sources, on the stream of their reader."""
        self.over[key] = self._lane.now()
        adds = {reader for reader in readers if reader is not None and len(self._sources[reader[0]]) > 1}
        streams = {stream for _, stream in adds} or {self._home}
        assert len(streams) == 1, "gradients of one node are added up on several streams, which is not played"
        self._compute_on(streams.pop())
        if adds:
            self.over[key].wait()
            self._use([gradient for gradient, reader in zip(gradients, readers, strict=True) if reader in adds])

    def _use(self, gradients: Sequence[Tensor | None]) -> None:
        for gradient in gradients:
            if gradient is not None:
                self._lane.used(gradient)


def _is_leaf(node: Any) -> bool:
    return bool(node.name() == "torch::autograd::AccumulateGrad")


def _key(node: Any) -> Any:
    """What tells a node apart without keeping it: all leaves have one sequence number."""
    return id(node.variable) if _is_leaf(node) else node._sequence_nr()


def _nodes(root: Any) -> Iterator[Any]:
    """Every node of a graph, once; those that a node reads from come after it."""
    found, waiting = {_key(root)}, [root]
    while waiting:
        node = waiting.pop()
        yield node
        for after, _ in node.next_functions:
            if after is not None and _key(after) not in found:
                found.add(_key(after))
                waiting.append(after)
