"""The store over gRPC, as one rank sees it: sync stubs, threads for bulk bytes, long polls for waits on peers.

Who waits where:

- ``fetch`` waits on publish notices (no thread, no call), then one server stream per owner fills ``out``.
- ``push`` waits for the rank's earlier pushes of the unit (no thread, no call).
- ``push`` and ``load`` are one client stream per owner, sent again whole when the link fails (the owner drops what
  it has already).
- ``finish``, ``commit``, ``decision``, ``discard`` and ``save`` wait for other ranks: calls that the lead answers
  with "ask again" every few seconds. They hold no thread and end on leave, abort or ``stall_timeout``.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import grpc
import torch
from torch import Tensor

from rayzero.errors import (
    ConfigError,
    HandshakeError,
    RayZeroError,
    StoreClosedError,
    StoreError,
    TransferError,
)
from rayzero.layout.model_layout import Shard, UnitLayout, dtype_name
from rayzero.layout.shard_map import ShardMap, shard_map_for
from rayzero.messages import (
    COMPUTE,
    PROTOCOL_VERSION,
    Attached,
    CheckpointInfo,
    Contribution,
    Decision,
    FileEntry,
    FinishReport,
    ModelSpec,
    Norm,
    StepInputs,
)
from rayzero.optimizer.futures import failed, settled
from rayzero.store import translate
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.gather import Gather
from rayzero.store.notices import PublishBoard
from rayzero.store.owner_link import QUICK_S, LongPoll, OwnerLink, Upload
from rayzero.store.push_order import PushOrder
from rayzero.store.rpc import MAX_CHUNK_BYTES, TlsFiles
from rayzero.store.stall import StallWatch
from rayzero.store.wire import Assembly, byte_view, encode_shard
from rayzero.telemetry.names import FETCH_SECONDS, PUSH_SECONDS, TRANSFER_BYTES, TRANSFER_RETRIES
from rayzero.telemetry.recorder import NullRecorder, Recorder

T = TypeVar("T")
Parts = list[tuple[OwnerLink, list[Shard]]]  # per owner, a unit's shards in order

log = logging.getLogger(__name__)

LEAVE_S = 5.0  # deadline of saying goodbye
_ATTEMPTS = 3  # of a bulk stream whose link fails
_RETRY_PAUSE_S = 0.1
_SLOWEST_BYTES_PER_S = 10e6  # a bulk stream slower than this is given up


class GrpcStore:
    """The optimizer actors of a run, over gRPC, as one rank sees them. A ``ParameterStore`` (store/protocol.py).

    Knows the owners' addresses, who has which shard and which versions are published; not how owners work or what
    the engine does with the bytes."""

    def __init__(
        self,
        rank: int,
        addresses: Sequence[str],
        *,
        token: str,
        tls: TlsFiles | None = None,
        stall_timeout: float = 600.0,
        chunk_bytes: int = 4 << 20,
        recorder: Recorder | None = None,
    ) -> None:
        """Open a channel to each owner (``addresses`` by owner index); nothing is sent before ``attach``.

        ``stall_timeout``: seconds a wait for a peer may last without progress. ``chunk_bytes``: payload of one
        message; 1-4 MiB are fastest."""
        if not 0 < chunk_bytes <= MAX_CHUNK_BYTES:
            raise ConfigError(f"chunk_bytes must be in 1..{MAX_CHUNK_BYTES:,}, got {chunk_bytes:,}")
        if not addresses:
            raise ConfigError("a gRPC store needs the address of at least one owner")
        self._rank, self._stall_s, self._chunk_bytes = rank, stall_timeout, chunk_bytes
        self._recorder = recorder or NullRecorder()
        self._links = [OwnerLink(rank, i, address, token=token, tls=tls) for i, address in enumerate(addresses)]
        self._board = PublishBoard()
        self._watch = StallWatch(rank, stall_timeout)
        self._order = PushOrder()
        self._closing = threading.Event()
        self._close_once = threading.Lock()
        streams = min(8, max(2, len(self._links)))  # at once; pushes never queue behind fetches
        self._fetches = ThreadPoolExecutor(streams, f"rayzero-rank{rank}-fetch")
        self._pushes = ThreadPoolExecutor(streams, f"rayzero-rank{rank}-push")
        self._answers = ThreadPoolExecutor(1, f"rayzero-rank{rank}-answers")
        self._threads: list[threading.Thread] = []
        self._notices: list[Any] = []  # streams under way. freed by: close()
        self._attached: tuple[ModelSpec, ShardMap] | None = None
        self._greeted = False  # some owner may know this rank
        atexit.register(self.close)

    # ---- handshake

    def attach(self, spec: ModelSpec) -> Attached:
        """Shake hands with every owner; see ``ParameterStore.attach``."""
        self._greeted = True
        # no shorter than any other call's deadline: an owner allocates, or restores a checkpoint, before it answers
        deadline_s = max(QUICK_S, self._stall_s)
        request = pb.AttachRequest(
            protocol_version=PROTOCOL_VERSION,
            rank=self._rank,
            spec=translate.spec_to_bytes(spec),
            layout_digest=spec.layout.digest,
            num_owners=len(self._links),
        )
        started = []
        for link in self._links:
            request.owner = link.owner
            started.append(link.start("Attach", request, deadline_s))
        answers = [link.answer(call) for link, call in zip(self._links, started, strict=True)]
        self._require_same("kernel", [answer.kernel for answer in answers])
        self._require_same("version", [answer.version for answer in answers])
        self._attached = spec, shard_map_for(spec.layout, len(self._links), spec.shard_map)
        self._listen()
        return Attached(version=answers[0].version, needs_load=any(answer.needs_load for answer in answers))

    def _require_same(self, what: str, values: Sequence[Any]) -> None:
        for link, value in zip(self._links, values, strict=True):
            if value != values[0]:
                raise HandshakeError(
                    f"{self._links[0].name} has {what} {values[0]!r}, {link.name} has {value!r}: "
                    "all owners of a run must agree"
                )

    # ---- notices

    def _listen(self) -> None:
        if self._threads:
            return
        self._notices = [link.notices() for link in self._links]
        names = [f"rayzero-rank{self._rank}-notices{link.owner}" for link in self._links]
        self._threads = [
            threading.Thread(target=self._follow, args=(link, stream), name=name, daemon=True)
            for link, stream, name in zip(self._links, self._notices, names, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def _follow(self, link: OwnerLink, stream: Any) -> None:
        """Take an owner's news until it ends; without it nothing more can be waited for."""
        try:
            for notice in stream:
                self._board.publish(link.owner, [(news.shard, news.version) for news in notice.published])
                if notice.HasField("abort"):
                    log.debug("rank %d: %s ends the run: %s", self._rank, link.name, notice.abort.message)
                    self._board.release(link.owner)
            self._board.fail(StoreError(f"rank {self._rank}: {link.name} stopped"))
        except grpc.RpcError as error:
            self._board.fail(link.error(error))

    # ---- bytes

    def load(self, unit: int, values: Tensor) -> Future[None]:
        """Send one unit's initial values; see ``ParameterStore.load``."""
        try:
            layout, parts = self._parts(unit)
            self._require_form("load", layout, values, torch.float32 if layout.trainable else layout.dtype)
        except RayZeroError as error:
            return failed(error)

        gather = Gather(len(parts))
        for link, shards in parts:
            send = partial(self._send_load, link, shards, unit, values)
            self._begin(self._pushes, gather, send, settled(None))
        return gather.future

    def _send_load(self, link: OwnerLink, shards: list[Shard], unit: int, values: Tensor) -> None:
        header = pb.LoadRequest.Header(unit=unit, shards=[shard.index for shard in shards])
        self._upload(link, "Load", pb.LoadRequest(header=header), shards, values, attempts=_ATTEMPTS)

    def push(self, contribution: Contribution, grads: Tensor) -> Future[None]:
        """Send one unit's gradients; see ``ParameterStore.push``."""
        try:
            layout, parts = self._parts(contribution.unit)
            self._require_form("push", layout, grads, layout.dtype)
        except RayZeroError as error:
            return failed(error)
        gather = Gather(len(parts), self._timing(PUSH_SECONDS))
        for link, shards in parts:
            send = partial(self._send_push, link, shards, contribution, grads)
            turn = self._order.turn(link.owner, contribution)
            turn.add_done_callback(partial(self._begin, self._pushes, gather, send))
        return gather.future

    def _send_push(self, link: OwnerLink, shards: list[Shard], contribution: Contribution, grads: Tensor) -> None:
        described = translate.contribution_to_pb(contribution)
        header = pb.PushRequest.Header(contribution=described, shards=[shard.index for shard in shards])
        with self._order.sending(link.owner, contribution):
            self._upload(link, "Push", pb.PushRequest(header=header), shards, grads, attempts=_ATTEMPTS)

    def fetch(self, unit: int, version: int, kind: str, out: Tensor) -> Future[None]:
        """Fill ``out``; see ``ParameterStore.fetch``."""
        try:
            layout, parts = self._parts(unit)
            self._require_form("fetch", layout, out, layout.dtype if kind == COMPUTE else torch.float32)
        except RayZeroError as error:
            return failed(error)
        gather = Gather(len(parts), self._timing(FETCH_SECONDS))
        for link, shards in parts:
            indices = [shard.index for shard in shards]
            request = pb.FetchRequest(
                rank=self._rank, shards=indices, version=version, kind=kind, chunk_bytes=self._chunk_bytes
            )
            published = self._board.when(link.owner, indices, version)
            what = f"{layout.name} v{version} from optimizer {link.owner}"
            self._watch.watch(published, what, partial(self._describe, link, indices[0]))
            download = partial(self._download, link, request, shards, out)
            published.add_done_callback(partial(self._begin, self._fetches, gather, download))
        return gather.future

    def _describe(self, link: OwnerLink, shard: int) -> str:
        """What the owner does for a shard, or why it does not say."""
        try:
            return str(link.ask("Describe", pb.DescribeRequest(shard=shard), LEAVE_S).text)
        except RayZeroError as error:
            return str(error)

    def _begin(self, pool: ThreadPoolExecutor, gather: Gather, part: Callable[[], None], ready: Future[None]) -> None:
        """Do a part of ``gather`` in ``pool``, now that what it waited for is there."""
        error = ready.exception()
        if error is not None:
            gather.end(error)
            return
        try:
            pool.submit(gather.run, part)
        except RuntimeError:  # the pool is shut down
            gather.end(self._closed_error())

    def _download(self, link: OwnerLink, request: pb.FetchRequest, shards: list[Shard], out: Tensor) -> None:
        """One unit's shards of one owner straight into ``out``."""
        size = sum(shard.numel for shard in shards) * out.itemsize

        def stream() -> None:
            messages = link.download(request, _bulk_deadline_s(size))
            for shard in shards:
                memory = byte_view(out[shard.start : shard.stop])
                assembly = Assembly(shard.index, memory.nbytes, memory)
                while not assembly.complete:
                    assembly.take(next(messages, None))
            if next(messages, None) is not None:
                raise TransferError(f"{link.name} sent more than the shards asked for")

        self._with_retries("fetch", _ATTEMPTS, stream)
        self._count("fetch", size)

    def _upload(
        self, link: OwnerLink, method: str, header: Any, shards: list[Shard], values: Tensor, *, attempts: int
    ) -> None:
        """One unit's shards of one owner out of ``values``; ``header`` goes with the first bytes."""
        size = sum(shard.numel for shard in shards) * values.itemsize

        def messages() -> Iterator[bytes]:
            opening = header.SerializeToString()
            for shard in shards:
                yield from encode_shard(shard.index, values[shard.start : shard.stop], self._chunk_bytes, opening)
                opening = b""

        self._with_retries(
            method.lower(), attempts, lambda: link.upload(method, Upload(messages()), _bulk_deadline_s(size))
        )
        self._count(method.lower(), size)

    def _with_retries(self, direction: str, attempts: int, stream: Callable[[], None]) -> None:
        """Run a stream that may be repeated whole; only a failed link or damaged bytes are tried again."""
        for left in reversed(range(attempts)):
            try:
                return stream()
            except TransferError as error:
                if left == 0 or self._board.error is not None or self._closing.wait(_RETRY_PAUSE_S):
                    raise
                log.warning("rank %d: %s again after: %s", self._rank, direction, error)
                self._recorder.add(TRANSFER_RETRIES, direction=direction, transport="grpc")

    # ---- the step

    def finish(self, report: FinishReport, inputs: StepInputs | None) -> Future[Norm]:
        """Say what was pushed; see ``ParameterStore.finish``."""
        sent = None if inputs is None else translate.inputs_to_pb(inputs)
        request = pb.FinishRequest(report=translate.report_to_pb(report), inputs=sent)
        awaited = f"the norm of step {report.step}"
        return self._ask_lead("Finish", request, lambda answer: translate.norm_from_pb(answer.norm), awaited)

    def commit(self, step: int, inputs: StepInputs) -> Future[Decision]:
        """Ask for the step to be decided; see ``ParameterStore.commit``."""
        request = pb.CommitRequest(rank=self._rank, step=step, inputs=translate.inputs_to_pb(inputs))
        return self._ask_lead("Commit", request, _read_decision, f"the decision of step {step}")

    def decision(self, step: int) -> Future[Decision]:
        """The recorded decision; see ``ParameterStore.decision``."""
        return self._ask_lead(
            "GetDecision", pb.GetDecisionRequest(step=step), _read_decision, f"the decision of step {step}"
        )

    def discard(self, step: int, attempt: int) -> Future[None]:
        """Reopen a step; see ``ParameterStore.discard``."""
        request = pb.DiscardRequest(rank=self._rank, step=step, attempt=attempt)
        return self._ask_lead("Discard", request, lambda _: None, f"the discard of step {step}")

    def save(self, step: int, directory: Path, files: tuple[FileEntry, ...]) -> Future[CheckpointInfo]:
        """Write a checkpoint; see ``ParameterStore.save``."""
        entries = [translate.file_to_pb(entry) for entry in files]
        request = pb.SaveRequest(rank=self._rank, step=step, directory=str(directory), files=entries)
        awaited = f"the checkpoint of step {step}"
        return self._ask_lead("Save", request, lambda a: translate.checkpoint_from_pb(a.checkpoint), awaited)

    def _ask_lead(self, method: str, request: Any, read: Callable[[Any], T], awaited: str) -> Future[T]:
        try:
            _, owners = self._require_attached()
        except RayZeroError as error:
            return failed(error)
        link = self._links[owners.owner(0)]
        poll = LongPoll(
            link,
            method,
            request,
            read,
            executor=self._answers,
            patience_s=self._stall_s,
            awaited=awaited,
            clock=time.monotonic,
        )
        return poll.future

    # ---- close

    def close(self, reason: str = "closed") -> None:
        """Leave the run; see ``ParameterStore.close``."""
        with self._close_once:
            if self._closing.is_set():
                return
            self._closing.set()
        atexit.unregister(self.close)
        if self._greeted:
            self._say_goodbye(reason)
        self._watch.close()
        self._board.fail(self._closed_error())
        self._order.fail(self._closed_error())
        for stream in self._notices:
            stream.cancel()
        for link in self._links:
            link.close()
        for pool in (self._fetches, self._pushes, self._answers):
            pool.shutdown(wait=True)
        for thread in self._threads:
            thread.join()

    def _say_goodbye(self, reason: str) -> None:
        request = pb.LeaveRequest(rank=self._rank, reason=reason)
        started = []
        for link in self._links:
            try:
                started.append((link, link.start("Leave", request, LEAVE_S)))
            except RayZeroError as error:
                log.info("rank %d: %s did not hear the goodbye: %s", self._rank, link.name, error)
        for link, call in started:
            try:
                link.answer(call)
            except RayZeroError as error:
                log.info("rank %d: %s did not hear the goodbye: %s", self._rank, link.name, error)

    # ---- small parts

    def _closed_error(self) -> StoreClosedError:
        return StoreClosedError(f"rank {self._rank} used its store after close()")

    def _require_attached(self) -> tuple[ModelSpec, ShardMap]:
        if self._closing.is_set():
            raise self._closed_error()
        if self._attached is None:
            raise StoreError(f"rank {self._rank}: attach() comes before anything else")
        return self._attached

    def _parts(self, unit: int) -> tuple[UnitLayout, Parts]:
        """A unit and its shards by owner, in shard order."""
        spec, owners = self._require_attached()
        if not 0 <= unit < len(spec.layout.units):
            raise StoreError(f"rank {self._rank}: no unit {unit}; the layout has {len(spec.layout.units)}")
        by_owner: dict[int, list[Shard]] = {}
        for shard in spec.layout.shards_by_unit[unit]:
            by_owner.setdefault(owners.owner(shard.index), []).append(shard)
        return spec.layout.units[unit], [(self._links[owner], shards) for owner, shards in by_owner.items()]

    def _require_form(self, verb: str, unit: UnitLayout, tensor: Tensor, dtype: torch.dtype) -> None:
        if tensor.shape != (unit.numel,):
            raise StoreError(f"{unit.name!r} has {unit.numel} elements, {verb} got a tensor of {tuple(tensor.shape)}")
        if tensor.dtype != dtype:
            raise StoreError(f"{verb} of {unit.name!r} takes {dtype_name(dtype)}, got {dtype_name(tensor.dtype)}")
        byte_view(tensor)

    def _timing(self, name: str) -> Callable[[], None]:
        began = time.perf_counter()
        return lambda: self._recorder.observe(name, time.perf_counter() - began, transport="grpc")

    def _count(self, direction: str, size_bytes: int) -> None:
        self._recorder.add(TRANSFER_BYTES, size_bytes, direction=direction, transport="grpc")


def _bulk_deadline_s(size_bytes: int) -> float:
    return QUICK_S + size_bytes / _SLOWEST_BYTES_PER_S


def _read_decision(answer: Any) -> Decision:
    return translate.decision_from_pb(answer.decision)
