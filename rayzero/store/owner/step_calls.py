"""Answers the calls of a step, from ranks to the lead and from the lead to owners: a message in, a future of a message
out, over any transport."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

from rayzero.concurrency.futures import then
from rayzero.errors import RayZeroError, StoreError
from rayzero.lead.attempt import OwnerPeer
from rayzero.lead.lead import StepLead
from rayzero.protocol.messages import MEAN_BYTES, Decision, Norm
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.wire import translate
from rayzero.store.wire.rpc import OWNER_SERVICE, STORE_SERVICE, methods
from rayzero.store.wire.translate import Once

log = logging.getLogger(__name__)


class Answering(Protocol):
    """The owner and the lead that answer in this process."""

    @property
    def service(self) -> OwnerPeer:
        """The owner."""
        ...

    def require_lead(self) -> StepLead:
        """The lead. Raises StoreError if this owner does not lead."""
        ...


class StepCalls:
    """Starts each call; waits for nothing.

    Knows the lead, this process's owner and what messages mean; not repeats, deadlines or transports."""

    def __init__(self, answering: Answering) -> None:
        self._answering = answering
        self._inputs, self._normed, self._decided = Once(translate.inputs_from_pb, _bits), Once(_normed), Once(_decided)
        self._averaged = Once(_averaged)
        self._begin: dict[str, Callable[[Any], Future[Any]]] = {
            "Finish": self._finish,
            "Commit": self._commit,
            "GetDecision": self._decision,
            "Discard": self._discard,
            "BeginSave": self._begin_save,
            "Save": self._save,
            "Write": self._write,
            "Mean": self._mean,
            "Overwrite": self._overwrite,
            "Collect": self._collect,
            "Apply": self._apply,
        }

    def begin(self, method: str, request: Any) -> Future[Any]:
        """Start a call; the future has its response. Raises StoreError if this owner cannot answer at all. An error
        that nobody foresaw ends the run: the lead or the owner may be half in another state, and must not go on."""
        try:
            return self._begin[method](request)
        except RayZeroError:
            raise
        except Exception as exc:
            log.exception("%s failed, which ends the run", method)
            error = StoreError(f"an owner failed: {exc!r}")
            self._answering.service.abort(error)
            raise error from exc

    def begin_bytes(self, method: str, request: bytes) -> Future[bytes]:
        """The same, for transports that carry bytes."""
        return then(self.begin(method, _REQUESTS[method].FromString(request)), lambda m: bytes(m.SerializeToString()))

    # ---- from ranks

    def _finish(self, request: pb.FinishRequest) -> Future[pb.FinishResponse]:
        inputs = self._inputs(request.inputs) if request.HasField("inputs") else None
        norm = self._answering.require_lead().finish(translate.report_from_pb(request.report), inputs)
        return then(norm, self._normed)

    def _commit(self, request: pb.CommitRequest) -> Future[pb.CommitResponse]:
        decision = self._answering.require_lead().commit(request.rank, request.step, self._inputs(request.inputs))
        return then(decision, self._decided)

    def _decision(self, request: pb.GetDecisionRequest) -> Future[pb.GetDecisionResponse]:
        decision = self._answering.require_lead().decision(request.step)
        return then(decision, lambda made: pb.GetDecisionResponse(decision=translate.decision_to_pb(made)))

    def _discard(self, request: pb.DiscardRequest) -> Future[pb.DiscardResponse]:
        done = self._answering.require_lead().discard(request.rank, request.step, request.attempt)
        return then(done, lambda _: pb.DiscardResponse())

    def _begin_save(self, request: pb.SaveRequest) -> Future[pb.BeginSaveResponse]:
        files = tuple(translate.file_from_pb(entry) for entry in request.files)
        begun = self._answering.require_lead().begin_save(request.rank, request.step, Path(request.directory), files)
        return then(begun, lambda _: pb.BeginSaveResponse())

    def _save(self, request: pb.SaveRequest) -> Future[pb.SaveResponse]:
        files = tuple(translate.file_from_pb(entry) for entry in request.files)
        lead, directory = self._answering.require_lead(), Path(request.directory)
        saved = lead.save(request.rank, request.step, directory, files, begun=request.begun)
        return then(saved, lambda info: pb.SaveResponse(checkpoint=translate.checkpoint_to_pb(info)))

    def _write(self, request: pb.WriteRequest) -> Future[pb.WriteResponse]:
        lead, write = self._answering.require_lead(), translate.write_from_pb(request.write)
        written = lead.know_write(request.rank, write) if request.made else lead.write(request.rank, write)
        return then(written, lambda _: pb.WriteResponse())

    def _mean(self, request: pb.MeanRequest) -> Future[pb.MeanResponse]:
        if (size := request.ByteSize()) > 2 * MEAN_BYTES:  # with all that is not counted there
            raise StoreError(f"rank {request.rank} gives {size:,} bytes to a mean, which has at most {MEAN_BYTES:,}")
        lead, given = self._answering.require_lead(), translate.mean_from_pb(request)
        if request.former:
            return then(lead.know_mean(request.rank, request.number, given), lambda _: self._averaged(()))
        return then(lead.mean(request.rank, request.number, given), self._averaged)

    # ---- from the lead

    def _collect(self, request: pb.CollectRequest) -> Future[pb.CollectResponse]:
        reports = translate.reports_from_pb(request.reports)
        return then(self._answering.service.collect(request.step, reports), translate.parts_to_pb)

    def _apply(self, request: pb.ApplyRequest) -> Future[pb.ApplyResponse]:
        applied = self._answering.service.apply(translate.decision_from_pb(request.decision))
        return then(applied, lambda _: pb.ApplyResponse())

    def _overwrite(self, request: pb.OverwriteRequest) -> Future[pb.OverwriteResponse]:
        written = self._answering.service.write(request.number, translate.write_from_pb(request.write))
        return then(written, lambda _: pb.OverwriteResponse())


def _bits(inputs: pb.StepInputs) -> bytes:
    return bytes(inputs.SerializeToString(deterministic=True))


def _normed(norm: Norm) -> pb.FinishResponse:
    return pb.FinishResponse(norm=translate.norm_to_pb(norm))


def _averaged(values: tuple[float, ...]) -> pb.MeanResponse:
    return pb.MeanResponse(mean=pb.MeanResponse.Mean(values=values))


def _decided(decision: Decision) -> pb.CommitResponse:
    return pb.CommitResponse(decision=translate.decision_to_pb(decision))


_REQUESTS = {
    name: method.request for service in (STORE_SERVICE, OWNER_SERVICE) for name, method in methods(service).items()
}
