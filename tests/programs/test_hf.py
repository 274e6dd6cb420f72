"""Tiny Hugging Face models with random weights train, and generate from prompts of other lengths on ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from integrations.training import generate
from integrations.zoo import GENERATING, MODELS, batch
from torch import Tensor, nn

from .case import Case, Program, Run, steps
from .engines import Setting


def training(name: str) -> Program:
    @steps
    def body(run: Run, step: int) -> Tensor:
        loss = run.model(**batch(name, step, run.rank)).loss
        loss.backward()
        return loss.detach()

    return body


def generating(name: str) -> Program:
    """Train, and generate between backward and step, and at the end; a rank more, a longer prompt and result."""

    def program(run: Run) -> Any:
        sequences = []
        for step in range(2):
            run.model(**batch(name, step, run.rank)).loss.backward()
            sequences.append(generate(run.model, run.rank))
            run.update()
        return [*sequences, generate(run.model, run.rank)]

    return program


def build(name: str, **settings: Any) -> nn.Module:
    return MODELS[name](**settings).train()


CASES = [
    *(Case(f"{name} trains", training(name), build=partial(build, name), ranks=(3,)) for name in MODELS),
    *(
        Case(
            f"{name} generates other lengths on each rank",
            generating(name),
            build=partial(build, name),
            ranks=(2,),
        )
        for name in GENERATING
    ),
]


@pytest.mark.spread(4, second=14)
def test_trains_as_unsharded(case: Case, setting: Setting, check: Callable[[Case, Setting], None]) -> None:
    check(case, setting)
