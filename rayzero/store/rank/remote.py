"""The store whose owners are other processes, as one rank sees it: those of its host through shared memory, the others
over gRPC.

Bytes move per owner (``store/rank/transfers/``). ``finish``, ``commit``, ``decision``, ``discard``, ``save`` and
``mean`` wait for other ranks: ``store/rank/lead_line.py`` asks the lead. They hold no thread and end on leave, abort
or ``stall_timeout``.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import grpc
import torch
from torch import Tensor

from rayzero.concurrency.futures import DONE, chain, fail, failed, settle, settled, when_all
from rayzero.concurrency.gather import Gather
from rayzero.errors import (
    ConfigError,
    HandshakeError,
    RayZeroError,
    StoreClosedError,
    StoreError,
    UnsupportedError,
)
from rayzero.layout.model_layout import Shard, UnitLayout, dtype_name
from rayzero.layout.shard_map import ShardMap
from rayzero.memory.malloc import keep_some_buffers
from rayzero.protocol.bits import digest_of
from rayzero.protocol.messages import (
    COMPUTE,
    PROTOCOL_VERSION,
    Attached,
    CheckpointInfo,
    Contribution,
    Decision,
    FileEntry,
    FinishReport,
    MeanInput,
    ModelSpec,
    Norm,
    Published,
    Pushed,
    StepInputs,
    Write,
)
from rayzero.protocol.ownership import owner_map
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.rank.lead_line import LeadLine
from rayzero.store.rank.memory.direct_memory import DirectMemory
from rayzero.store.rank.memory.gradient_region import GradientRegion
from rayzero.store.rank.memory.gradient_writer import GradientWriter
from rayzero.store.rank.memory.shared_memory import SharedRank, doubt_of_locks
from rayzero.store.rank.owner_link import QUICK_S, OwnerLink, say_goodbye
from rayzero.store.rank.publish_board import PublishBoard
from rayzero.store.rank.push_order import PushOrder
from rayzero.store.rank.stall import StallWatch
from rayzero.store.rank.transfers.shared import SharedTransfers
from rayzero.store.rank.transfers.wire import Transfers, WireOptions, transfer_threads
from rayzero.store.shm.plan import SharedPlan
from rayzero.store.shm.same_host import host_identity
from rayzero.store.traffic import count_bytes, tell_build, watch_gradients
from rayzero.store.wire import translate
from rayzero.store.wire.payload import byte_view
from rayzero.store.wire.rpc import TlsFiles, from_failure
from rayzero.telemetry.metric import Metric
from rayzero.telemetry.names import FETCH_SECONDS, PUSH_SECONDS
from rayzero.telemetry.recorder import NullRecorder, Recorder

T = TypeVar("T")
Parts = list[tuple[Transfers | SharedTransfers, list[Shard]]]  # per owner, a unit's shards in order
Away = list[tuple[Transfers, list[Shard]]]  # those of other hosts

log = logging.getLogger(__name__)


class RemoteStore(DirectMemory):
    """The optimizer actors of a run, as one rank sees them. A ``ParameterStore`` (protocol/store.py).

    Knows the owners' addresses, who has which shard, which versions are published and what way leads to whom; not how
    owners work or what the engine does with the bytes."""

    def __init__(
        self,
        rank: int,
        addresses: Sequence[str],
        *,
        token: str,
        tls: TlsFiles | None = None,
        model: int = 0,
        stall_timeout: float = 600.0,
        chunk_bytes: int = WireOptions().chunk_bytes,
        wire_compression: str = "none",
        broadcast: str = "pull",
        share: Path | None = None,
        share_with_all: bool = False,
        recorder: Recorder | None = None,
    ) -> None:
        """Open a channel to each owner (``addresses`` by owner index); nothing is sent before ``attach``.

        ``model``: which of the run's prepared models it is for, by number.
        ``stall_timeout``: seconds a wait for a peer may last without progress. ``chunk_bytes``,
        ``wire_compression``, ``broadcast``: see ``ZeroConfig``. ``share``: the directory of memory that is shared with
        owners of this host; None: gRPC with all. ``share_with_all``: an owner elsewhere is an error."""
        options = WireOptions(chunk_bytes=chunk_bytes, wire_compression=wire_compression, broadcast=broadcast)
        if not addresses:
            raise ConfigError("a store needs the address of at least one owner")
        self._rank, self._stall_s = rank, stall_timeout
        self._recorder = recorder or NullRecorder()
        self._links = [
            OwnerLink(rank, i, address, token=token, tls=tls, model=model) for i, address in enumerate(addresses)
        ]
        self._board = PublishBoard()
        self._watch = StallWatch(rank, stall_timeout)
        self._order = PushOrder()
        self._closing = threading.Event()
        self._close_once = threading.Lock()
        self._attaching = threading.RLock()  # held until an attach has ended: what it makes, close() ends after it
        self._fetches = transfer_threads(len(addresses), rank, "fetch")
        self._pushes = transfer_threads(len(addresses), rank, "push")
        self._wires = [
            Transfers(
                link,
                fetches=self._fetches,
                pushes=self._pushes,
                board=self._board,
                order=self._order,
                watch=self._watch,
                closing=self._closing,
                lead_says=self._lead_says,
                options=options,
                recorder=self._recorder,
            )
            for link in self._links
        ]
        self._transfers: list[Transfers | SharedTransfers] = list(self._wires)  # by owner
        self._share, self._share_with_all = share, share_with_all
        self._shared: SharedRank | None = None  # after attach, where some owner is of this host
        self._lead: LeadLine | None = None  # after attach
        self._threads: list[threading.Thread] = []
        self._notices: list[Any] = []  # streams under way. freed by: close()
        self._attached: tuple[ModelSpec, ShardMap] | None = None
        self._writes = self._saves = self._means = 0  # asked for so far
        self._greeted = False  # some owner may know this rank
        atexit.register(self.close)

    # ---- handshake

    def attach(self, spec: ModelSpec, *, page_lock: bool = False) -> Attached:
        """Shake hands with every owner; see ``ParameterStore.attach``."""
        with self._attaching:
            return self._shake_hands(spec, page_lock)

    def _shake_hands(self, spec: ModelSpec, page_lock: bool) -> Attached:
        self._greeted = True
        # no shorter than any other call's deadline: an owner allocates, or restores a checkpoint, before it answers
        deadline_s = max(QUICK_S, self._stall_s)
        request = pb.AttachRequest(
            protocol_version=PROTOCOL_VERSION,
            rank=self._rank,
            spec=translate.spec_to_bytes(spec),
            layout_digest=spec.layout.digest,
            num_owners=len(self._links),
            host=host_identity(self._share) if self._share is not None else "",
        )
        started = []
        for link in self._links:
            request.owner = link.owner
            started.append(link.start("Attach", request, deadline_s))
        answers = [link.answer(call) for link, call in zip(self._links, started, strict=True)]
        self._require_same("kernel", [answer.kernel for answer in answers])
        self._require_same("version", [answer.version for answer in answers])
        self._attached = spec, owner_map(spec, len(self._links))
        if self._lead is None:
            offers = {link.owner: answer.shared for link, answer in zip(self._links, answers, strict=True)}
            self._join_host({owner: files for owner, files in offers.items() if files.control}, page_lock)
            link = self._links[self._attached[1].owner(0)]
            self._lead = LeadLine(link, self._shared, self._watch)  # freed by: close()
            self._listen()
        here = [self._is_shared(link.owner) for link in self._links]
        if not all(here):
            keep_some_buffers()  # of what comes and goes in messages
        ways = {(True, True): "shm", (True, False): "shm+grpc", (False, False): "grpc"}
        tell_build(self._recorder, answers[0].kernel, ways[any(here), all(here)])
        return Attached(version=answers[0].version, needs_load=any(answer.needs_load for answer in answers))

    def _join_host(self, offers: Mapping[int, pb.SharedFiles], page_lock: bool) -> None:
        """Share memory with the owners of this host, by owner what they offer."""
        spec, owners = self._require_attached()
        away = [link.owner for link in self._links if link.owner not in offers]
        if self._share_with_all and away:
            raise UnsupportedError(
                f"transport='shm', but optimizers {away} share no memory with rank {self._rank}: use 'auto'"
            )
        if self._share is None:
            return
        ways = {"shared memory": list(offers), "gRPC (another host or container)": away}
        said = ", ".join(f"{way} to optimizers {owners}" for way, owners in ways.items() if owners)
        log.info("rank %d: %s", self._rank, said)
        if not offers:
            return
        plan = SharedPlan(spec, owners)
        if page_lock and (doubt := doubt_of_locks(plan, list(offers))) is not None:
            log.warning("rank %d: %s", self._rank, doubt)
        shared = self._shared = SharedRank(self._rank, plan, self._share, page_lock=page_lock)  # freed by: close()
        for owner, files in offers.items():
            shared.meet(owner, translate.paths_from_pb(files))
            self._transfers[owner] = SharedTransfers(
                owner,
                shared,
                self._wires[owner],
                board=self._board,
                copies=self._fetches,
                recorder=self._recorder,
            )
        controls = {owner: files.control for owner, files in offers.items()}
        request = pb.ShareRequest(rank=self._rank, files=translate.paths_to_pb(shared.offer()), controls=controls)
        calls = [(self._links[owner], self._links[owner].start("Share", request)) for owner in offers]
        for link, call in calls:
            link.answer(call)
        self._windows = shared.windows()
        region = GradientRegion(spec, shared.gradients())
        self._unwatch = watch_gradients(self._recorder, region.flats.values(), "shm")
        self._writer = GradientWriter(region, self, f"rayzero-rank{self._rank}")
        shared.listen(self._board)

    def _require_same(self, what: str, values: Sequence[Any]) -> None:
        for link, value in zip(self._links, values, strict=True):
            if value != values[0]:
                raise HandshakeError(
                    f"{self._links[0].name} has {what} {values[0]!r}, {link.name} has {value!r}: "
                    "all owners of a run must agree"
                )

    # ---- notices

    def _listen(self) -> None:
        self._notices = [link.notices(quiet=self._is_shared(link.owner)) for link in self._links]
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
                self._board.publish(link.owner, [Published(p.shard, p.version, p.content) for p in notice.published])
                if notice.HasField("abort"):
                    log.debug("rank %d: %s ends the run: %s", self._rank, link.name, notice.abort.message)
                    self._board.release(link.owner, from_failure(notice.abort))
            self._lost(link, StoreError(f"rank {self._rank}: {link.name} stopped"))
        except grpc.RpcError as error:
            self._lost(link, link.error(error))

    def _lost(self, link: OwnerLink, error: RayZeroError) -> None:
        self._board.fail(error)
        if self._shared is not None:
            self._shared.lost(link.owner, error)

    # ---- bytes

    def load(self, unit: int, values: Tensor) -> Future[None]:
        """Send one unit's initial values; see ``ParameterStore.load``."""
        try:
            layout, parts = self._parts(unit)
            self._require_form("load", layout, values, layout.initial_dtype)
        except RayZeroError as error:
            return failed(error)

        gather = Gather(len(parts))
        for transfers, shards in parts:
            transfers.load(gather, unit, shards, values)
        return gather.future

    def push(self, contribution: Contribution, grads: Tensor) -> Future[None]:
        """Send one unit's gradients; see ``ParameterStore.push``."""
        try:
            layout, parts = self._parts(contribution.unit)
            self._require_form("push", layout, grads, layout.dtype)
        except RayZeroError as error:
            return failed(error)
        away = [(self._wires[t.owner], mine) for t, mine in parts if not self._is_shared(t.owner)]
        here = sum(shard.numel for t, mine in parts for shard in mine if self._is_shared(t.owner))
        gather = Gather((len(away) > 0) + (here > 0), self._timing(PUSH_SECONDS))
        sent = self._send(gather, away, layout, contribution, grads) if away else DONE
        if here and self._writer is not None:
            written = self._writer.push(contribution, grads, sent)
            written.add_done_callback(partial(self._written, gather, here, grads.dtype))
        return gather.future

    def announce(self, unit: int, pushed: Pushed) -> None:
        """Tell the owners of this host; see ``GradientReaders``."""
        assert self._shared is not None
        self._shared.announce(unit, pushed)

    def _send(
        self, gather: Gather, away: Away, unit: UnitLayout, contribution: Contribution, grads: Tensor
    ) -> Future[None]:
        """Send to owners elsewhere, one part of ``gather``; done, never failed, when ``grads`` is read no more."""
        sending, sent = Gather(len(away)), Future[None]()

        def over(all_sent: Future[None]) -> None:
            settle(sent, None)
            gather.end(all_sent.exception())

        sending.future.add_done_callback(over)
        for wire, shards in away:
            wire.push(sending, unit, shards, contribution, grads)
        return sent

    def _written(self, gather: Gather, numel: int, dtype: torch.dtype, done: Future[None]) -> None:
        error = done.exception()
        if error is None:
            count_bytes(self._recorder, "push", "shm", numel, dtype, dtype)
        gather.end(error)

    def _is_shared(self, owner: int) -> bool:
        return self._transfers[owner] is not self._wires[owner]

    def fetch(self, unit: int, version: int, kind: str, out: Tensor) -> Future[None]:
        """Fill ``out``; see ``ParameterStore.fetch``."""
        try:
            layout, parts = self._parts(unit)
            self._require_form("fetch", layout, out, layout.dtype if kind == COMPUTE else torch.float32)
        except RayZeroError as error:
            return failed(error)
        gather = Gather(len(parts), self._timing(FETCH_SECONDS))
        for transfers, shards in parts:
            transfers.fetch(gather, layout, shards, version, kind, out)
        return gather.future

    def published(self, unit: int, version: int) -> Future[int]:
        """Wait for a version; see ``ParameterStore.published``."""
        done: Future[int] = Future()
        try:
            layout, parts = self._parts(unit)
        except RayZeroError as error:
            return failed(error)
        shards = [shard.index for _, mine in parts for shard in mine]

        def look(_: object) -> None:
            content = self._board.content(shards, version)
            if content is not None:
                settle(done, content)
                return
            # an owner ends the run: only it can tell whether the version still comes, or why not
            asked = self.fetch(unit, version, COMPUTE, torch.empty(layout.numel, dtype=layout.dtype))
            when_all([asked], lambda _: settle(done, version), partial(fail, done))

        waits = [transfers.published(f"{layout.name} v{version}", mine, version) for transfers, mine in parts]
        when_all(waits, look, partial(fail, done))
        return done

    # ---- writes

    def write(self, unit: int, version: int, kind: str, values: Tensor) -> Future[None]:
        """Change a unit; see ``ParameterStore.write``. Rank 0 sends the bytes first."""
        try:
            layout, parts = self._parts(unit)
            self._require_form("write", layout, values, layout.dtype if kind == COMPUTE else torch.float32)
        except RayZeroError as error:
            return failed(error)
        self._writes += 1
        sent = translate.write_to_pb(Write(version=version, unit=unit, kind=kind, digest=digest_of(values)))
        request = pb.WriteRequest(rank=self._rank, write=sent, number=self._writes)
        staged = Gather(len(parts) if self._rank == 0 else 0)
        for transfers, shards in parts if self._rank == 0 else ():
            transfers.stage(staged, unit, shards, version, kind, values)
        done: Future[None] = Future()
        awaited = f"the write to {layout.name} at step {version}"

        def ask(_: object) -> None:
            chain(self._ask_lead("Write", request, lambda _: None, awaited), done)

        when_all([staged.future], ask, partial(fail, done))
        return done

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
        self._saves += 1
        request = pb.SaveRequest(
            rank=self._rank, step=step, directory=str(directory), files=entries, number=self._saves
        )
        awaited = f"the checkpoint of step {step}"
        return self._ask_lead("Save", request, lambda a: translate.checkpoint_from_pb(a.checkpoint), awaited)

    def mean(self, given: MeanInput) -> Future[tuple[float, ...]]:
        """The mean over all ranks; see ``ParameterStore.mean``."""
        self._means += 1
        request = translate.mean_to_pb(self._rank, self._means, given)
        return self._ask_lead("Mean", request, lambda answer: tuple(answer.mean.values), f"the mean of {given}")

    def _ask_lead(self, method: str, request: Any, read: Callable[[Any], T], awaited: str) -> Future[T]:
        try:
            self._require_attached()
        except RayZeroError as error:
            return failed(error)
        assert self._lead is not None
        return self._lead.ask(method, request, read, awaited)

    def _lead_says(self, timeout_s: float) -> Future[str]:
        """Whom the step waits for."""
        if self._lead is None:
            return settled("it is not known before attach() has ended")
        return self._lead.describe(timeout_s)

    # ---- close

    def close(self, reason: str = "closed") -> None:
        """Leave the run; see ``ParameterStore.close``."""
        with self._close_once:
            if self._closing.is_set():
                return
            self._closing.set()
        atexit.unregister(self.close)
        if self._greeted:
            say_goodbye(self._links, reason)
        self._board.fail(self._closed_error())
        self._order.fail(self._closed_error())
        for stream in self._notices:
            stream.cancel()
        for link in self._links:
            link.close()  # an attach of another thread fails
        self._watch.close()  # which asks nobody any more
        with self._attaching:
            self._free()

    def _free(self) -> None:
        self._close_memory()
        if self._shared is not None:
            self._shared.close(self._closed_error())
        if self._lead is not None:
            self._lead.close()
        for pool in (self._fetches, self._pushes):
            pool.shutdown(wait=True)
        for thread in self._threads:
            thread.join()

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
        return spec.layout.units[unit], [(self._transfers[owner], shards) for owner, shards in by_owner.items()]

    def _require_form(self, verb: str, unit: UnitLayout, tensor: Tensor, dtype: torch.dtype) -> None:
        if tensor.shape != (unit.numel,):
            raise StoreError(f"{unit.name!r} has {unit.numel} elements, {verb} got a tensor of {tuple(tensor.shape)}")
        if tensor.dtype != dtype:
            raise StoreError(f"{verb} of {unit.name!r} takes {dtype_name(dtype)}, got {dtype_name(tensor.dtype)}")
        byte_view(tensor)

    def _timing(self, metric: Metric) -> Callable[[], None]:
        began = time.perf_counter()
        return lambda: self._recorder.observe(metric, time.perf_counter() - began, transport="grpc")


def _read_decision(answer: Any) -> Decision:
    return translate.decision_from_pb(answer.decision)
