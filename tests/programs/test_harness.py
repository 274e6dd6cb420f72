"""The harness finds what is wrong, what hangs and who waits for what."""

from __future__ import annotations

import threading

import pytest
import torch
from engine.models import token_loss

from . import engines
from .case import Case, Run, steps, train
from .engines import Setting, limited, run_rayzero
from .fsdp2 import Fsdp2Ranks

SETTING = Setting("none", 2, "fp32", "inprocess")


@steps
def wrong_under_rayzero(run: Run, step: int) -> None:
    (token_loss(run.model, run.batch(step)) * (1 if run.engine == "torch" else 1.001)).backward()


def wrong_result(run: Run) -> object:
    return train(run), [run.engine == "torch"]


def test_other_weights_and_other_results_are_wrong() -> None:
    for program, where in ((wrong_under_rayzero, "state layers"), (wrong_result, "returned [1][0]")):
        result = run_rayzero(Case("wrong", program), SETTING)
        assert result.kind == "wrong"
        assert result.reason.startswith(where)


def test_a_hang_names_who_waits_for_what(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, never = threading.Event(), threading.Event()

    def waits(run: Run) -> None:
        if run.rank == 1 and run.engine == "rayzero":
            begun.set()
            never.wait()
        train(run)

    monkeypatch.setattr(engines, "limited", lambda act, _: limited(act, 1.0, since=begun))
    result = run_rayzero(Case("waits", waits), SETTING)
    never.set()
    assert result.kind == "hangs"
    assert "rank-1 waits in" in result.reason
    assert "called by waits: never.wait()" in result.reason


def test_an_error_is_told_with_its_traceback() -> None:
    def fails(run: Run) -> None:
        torch.zeros(2) @ torch.zeros(3)

    result = run_rayzero(Case("fails", fails), SETTING)
    assert result.kind == "error"
    assert "in fails" in result.reason


def only_rank_0(run: Run) -> object:
    if run.rank == 1 and run.engine == "fsdp2":
        threading.Event().wait()
    return train(run)


CASES = [Case("only rank 0", only_rank_0)]


def test_under_fsdp2_a_hang_is_a_result_that_says_where() -> None:
    ranks = Fsdp2Ranks(limit_s=2.0)
    try:
        result = ranks.train(CASES[0], Setting("harness", 2, "fp32", "fsdp2"))
    finally:
        ranks.close()
    assert result.kind == "hangs"
    assert result.reason.startswith(("rank 0 waits in", "rank 1 waits in"))
