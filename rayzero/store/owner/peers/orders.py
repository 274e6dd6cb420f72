"""What the lead asks of every owner alike: each message is made once for all of them."""

from __future__ import annotations

from rayzero.protocol.messages import Decision, FinishReport
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.wire import translate
from rayzero.store.wire.once import Once


def _collect(reports: tuple[FinishReport, ...]) -> pb.CollectRequest:
    return pb.CollectRequest(step=reports[0].step, reports=translate.reports_to_pb(reports))


def _apply(decision: Decision) -> pb.ApplyRequest:
    return pb.ApplyRequest(decision=translate.decision_to_pb(decision))


collect_request = Once(_collect)  # of all ranks' reports of one step
apply_request = Once(_apply)  # of a decision
