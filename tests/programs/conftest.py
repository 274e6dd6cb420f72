"""``--engine fsdp2``: the cases under FSDP2. ``--all-stores``: the whole product. ``--record``: write the table."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import product

import pytest
import torch
from store.stores import STORES

from .case import Case
from .engines import RESIDENCIES, Result, Setting, cases_of, debug, run_rayzero
from .fsdp2 import Fsdp2Ranks
from .table import Table

OTHER_STORES = [store for store in ("grpc", "shm", "mixed") if store in STORES]

OTHER_RESIDENCIES = [how for how in RESIDENCIES if how != "one ahead"]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("training programs")
    group.addoption("--engine", choices=("rayzero", "fsdp2"), default="rayzero")
    group.addoption("--all-stores", action="store_true", help="every case on every store, with every setting")
    group.addoption("--record", action="store_true", help="write what came of the cases to the table")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every case with each of its settings; under FSDP2 each case once."""
    if "setting" not in metafunc.fixturenames:
        return
    category = metafunc.module.__name__.rpartition(".test_")[2]
    cases: list[Case] = metafunc.module.CASES
    found = []
    for number, case in enumerate(cases):
        chosen = settings(category, number, case, metafunc.config)
        for at, setting in enumerate(chosen):
            early = at == _in_the_first_tier(number, chosen) and not case.thorough
            marks = [] if early else [pytest.mark.thorough]
            found.append(pytest.param(case, setting, id=f"{case.name}-{setting}", marks=marks))
    metafunc.parametrize(("case", "setting"), found)


def _in_the_first_tier(number: int, chosen: Sequence[Setting]) -> int:
    """Which of a case's settings the first tier has: those in process in turn, and with every eighth case another
    store, whose servers and connections cost five times what the case does."""
    here = [at for at, setting in enumerate(chosen) if setting.store == "inprocess"]
    others = [at for at in range(len(chosen)) if at not in here]
    among = others if others and (number % 8 == 1 or not here) else here
    return among[number % len(among)]


def settings(category: str, number: int, case: Case, config: pytest.Config) -> list[Setting]:
    """One in process, with units kept up in one way or another, and one over another store. Numbers of ranks,
    precisions and what comes together change from case to case. ``--all-stores``: every store with every number of
    ranks and both precisions."""
    if config.getoption("--engine", "rayzero") == "fsdp2":
        return [Setting(category, 2, "fp32", "fsdp2")]
    if case.once:
        return [Setting(category, 1, "fp32", "inprocess")]
    if case.draws and min(case.ranks) > 1:  # processes take seconds to start
        return [Setting(category, case.ranks[0], "fp32", "shm"), Setting(category, case.ranks[-1], "bf16", "grpc")]
    if config.getoption("--all-stores", False):
        places = product(case.ranks, case.precisions, ("inprocess", *OTHER_STORES))
        return [Setting(category, *place) for place in places]
    turn = number // 3  # the roles below change places with every case, what they are with every third
    how = OTHER_RESIDENCIES[turn % len(OTHER_RESIDENCIES)]
    roles = [("inprocess", how), (OTHER_STORES[turn % len(OTHER_STORES)], "one ahead")]
    found = []
    for i, (store, residency) in enumerate(roles):
        precision = case.precisions[(number // 2 + i) % len(case.precisions)]
        # Sums on the device are rounded to bf16 once, when they leave: not what the oracle's fp32 sums of bf16 are.
        if residency == "sums on device" and "fp32" in case.precisions:
            precision = "fp32"
        found.append(Setting(category, case.ranks[(number + i) % len(case.ranks)], precision, store, residency))
    return found


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    pass


@pytest.fixture(autouse=True)
def _anomaly_mode_ends() -> Iterator[None]:
    """It is the process's: ranks that are threads enter and leave it across each other, and one may restore "on"."""
    yield
    torch.autograd.set_detect_anomaly(False)


@pytest.fixture(scope="session")
def fsdp2_ranks() -> Iterator[Fsdp2Ranks]:
    """Two processes that train cases under FSDP2, one after the other."""
    ranks = Fsdp2Ranks()
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def table() -> Table:
    """What is known of all cases."""
    return Table.read()


@pytest.fixture
def check(request: pytest.FixtureRequest, table: Table) -> Callable[[Case, Setting], None]:
    """Run a case in a setting: RayZero must be right, or refuse as the case says; FSDP2 as it was recorded."""
    record = request.config.getoption("--record", False)

    def note(case: Case, setting: Setting, engine: str, result: Result) -> None:
        table.note(setting.category, case, engine, result)
        table.write(setting.category, [case.name for case in cases_of(setting.category)])

    def under_rayzero(case: Case, setting: Setting) -> None:
        with debug(setting):
            result = run_rayzero(case, setting)
        if case.refused is None:
            assert result.kind == "same", f"{result.kind}: {result.reason}"
        else:
            assert result.kind == "refused", f"{result.kind}: {result.reason}"
            assert re.search(case.refused, result.reason)
        if record:
            note(case, setting, "rayzero", result)

    def under_fsdp2(case: Case, setting: Setting) -> None:
        ranks: Fsdp2Ranks = request.getfixturevalue("fsdp2_ranks")
        result = ranks.train(case, setting)
        if record:
            note(case, setting, "fsdp2", result)
        else:
            recorded = table.row(setting.category, case).fsdp2
            same = (result.kind == "same", recorded == "same")  # how collectives that do not match end is chance
            assert same[0] is same[1], f"{result.kind}, not {recorded}: {result.reason}"

    return lambda case, setting: (under_fsdp2 if setting.store == "fsdp2" else under_rayzero)(case, setting)
