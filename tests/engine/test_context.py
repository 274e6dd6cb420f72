"""Contexts, run_ranks, and the torch the engine stands on."""

from __future__ import annotations

import multiprocessing
import os
import threading

import pytest
import torch
from forked import forked
from torch.utils.checkpoint import checkpoint

import rayzero
from rayzero.engine import private_torch
from rayzero.engine.context import RankContext, running_in
from rayzero.engine.loop.tracked import LoopReport
from rayzero.errors import ConfigError, RunFailedError, UnsupportedError
from rayzero.testing import run_ranks
from tests.support.leftovers import threads, threads_left

from .models import Net, seeded, token_loss, tokens


def test_reports_go_to_the_sink_and_are_kept_only_without_one() -> None:
    sent: list[LoopReport] = []
    with running_in(RankContext(sink=sent.append)) as context:
        rayzero.report({"loss": torch.tensor(1.5)})
        rayzero.report({})
    assert sent == [LoopReport(step=0, number=0, metrics={"loss": 1.5}), LoopReport(step=0, number=1, metrics={})]
    assert context.reports == [], "a long run would keep them all"
    with running_in(RankContext()) as context:
        rayzero.report({"loss": 1.5})
    assert context.reports == [{"loss": 1.5}]


def test_a_checkpoint_that_is_not_what_save_checkpoint_returned_is_refused() -> None:
    with running_in(RankContext()), pytest.raises(ConfigError, match=r"'runs/a' \(str\); pass what save_checkpoint"):
        rayzero.report({}, checkpoint="runs/a")  # type: ignore[arg-type]


def test_a_context_closes_what_prepare_opened_and_says_why() -> None:
    reasons: list[str] = []
    context = RankContext()
    context.on_close(reasons.append)
    with pytest.raises(ZeroDivisionError), running_in(context):
        raise ZeroDivisionError("why")
    assert reasons == ["ZeroDivisionError: why"]
    context.close()
    assert len(reasons) == 1


@pytest.mark.parametrize("transport", ["inproc", "grpc"])
def test_the_first_failing_ranks_error_is_raised_with_its_name_and_nothing_is_left(transport: str) -> None:
    base = [seeded(Net) for _ in range(3)]

    def loop(context: RankContext) -> None:
        model = base[context.rank]
        model, optimizer = rayzero.prepare(model, torch.optim.AdamW(model.parameters()))
        for step in range(5):
            if (step, context.rank) == (2, 1):
                raise ZeroDivisionError("as planned")
            token_loss(model, tokens(step, context.rank)).backward()
            optimizer.clip_grad_norm_(1.0)  # the others wait here for the one that fails
            optimizer.step()
            optimizer.zero_grad()

    before = threads()
    with pytest.raises(ZeroDivisionError, match="as planned") as caught:
        run_ranks(loop, 3, 2, transport)  # type: ignore[arg-type]
    assert caught.value.__notes__[0] == "on rank 1"
    assert threads_left(before) == []


def _fail_on_rank_1(context: RankContext) -> None:
    if context.rank == 1:
        raise ZeroDivisionError("as planned")
    threading.Event().wait()  # for ever: it must be ended


def _die_on_rank_1(context: RankContext) -> None:
    if context.rank == 1:
        os._exit(3)
    threading.Event().wait()


def test_a_failing_process_ends_the_others() -> None:
    with pytest.raises(ZeroDivisionError, match="as planned") as caught:
        run_ranks(_fail_on_rank_1, 2, 1, "grpc", processes=True)
    assert "on rank 1" in caught.value.__notes__[0]
    assert "_fail_on_rank_1" in caught.value.__notes__[0]
    with pytest.raises(RunFailedError, match="process of rank 1 died"):
        run_ranks(_die_on_rank_1, 2, 1, "grpc", processes=True)
    assert not multiprocessing.active_children()


def test_impossible_runs_are_refused() -> None:
    with pytest.raises(ConfigError, match="other processes"):
        run_ranks(_die_on_rank_1, processes=True)
    with pytest.raises(ConfigError, match=">= 1"):
        run_ranks(_die_on_rank_1, 0)
    with pytest.raises(ConfigError, match="max_failures is -1; pass a number >= 0"):
        run_ranks(_die_on_rank_1, max_failures=-1)
    with pytest.raises(ConfigError, match='max_failures=1 with transport="shm" needs processes'):
        run_ranks(print, 1, 1, "shm", max_failures=1)
    with pytest.raises(ConfigError, match="and 0 with a transport of your own"):
        run_ranks(_die_on_rank_1, transport=lambda *_: None, max_failures=1)  # type: ignore[arg-type,return-value]


def test_public_names_are_sorted_and_there() -> None:
    assert rayzero.__all__ == sorted(rayzero.__all__)
    with pytest.raises(AttributeError, match="no attribute 'prepared'"):
        rayzero.prepared  # noqa: B018


def test_a_torch_that_behaves_differently_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    private_torch.self_test()
    private_torch.self_test.cache_clear()
    monkeypatch.setattr(private_torch, "use_count", lambda key: 7)
    with pytest.raises(UnsupportedError, match=rf"torch {torch.__version__[:4]}.*storage swap and use count"):
        private_torch.self_test()


def test_the_hooks_of_a_checkpoint_are_known_in_its_forward_and_in_its_recomputation() -> None:
    seen: list[tuple[bool, bool]] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        pack, _ = private_torch.saved_tensor_hooks_below() or (lambda tensor: tensor, None)
        seen.append((private_torch.is_checkpoints(pack), private_torch.is_recomputations(pack)))
        return x.exp()

    x = torch.ones(2, requires_grad=True)
    checkpoint(function, x, use_reentrant=False).sum().backward()
    assert seen == [(True, False), (False, True)]


def test_ranks_and_owners_load_the_compiler_only_to_compile() -> None:
    """To import it takes seconds, and torch's optimizers do when they are made, and when they step."""
    code = """
        import sys, torch, rayzero
        from rayzero.modes import load_compiler_only_to_compile

        load_compiler_only_to_compile()
        for options in ({}, {"momentum": 0.9}):
            make = torch.optim.SGD if options else torch.optim.AdamW
            model = torch.nn.Linear(2, 2)
            model, optimizer = rayzero.prepare(model, make(model.parameters(), lr=1e-2, **options))
            for step in range(2):
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        print("torch._dynamo" in sys.modules)

        plain = torch.nn.Linear(2, 2)
        sgd = torch.optim.SGD(plain.parameters(), lr=0.5)

        @torch.compile(backend="eager")
        def train(x):
            plain(x).sum().backward()
            sgd.zero_grad()
            return x + 1

        print(train(torch.ones(1, 2)).tolist(), plain.weight.grad)
        """
    with forked(code) as process:
        assert process.stdout.read().split() == ["False", "[[2.0,", "2.0]]", "None"]
