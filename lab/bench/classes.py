"""What does an owner's update by a torch class cost: against the class in plain PyTorch, and of it the undo copy?

    python -m lab classes [--dim 1024] [--layers 2] [--threads 1] [--rounds 9] [--json]

Parameters are the matrices of transformer blocks of a width, whole, with bf16 gradients in and bf16 parameters out. A
round does each of these once, in turn:

    products   torch.optim._muon's own function over all momenta: the operations that Muon cannot do without
    plain      step() of the class in plain PyTorch, with fp32 gradients that are there already
    owner      what an owner does with each shard: the sum over ranks, the class's step(), the states, publishing
    undo       the same with a copy of masters and states before, as owners make it whose memory outlives them

Figures are seconds of this process on a CPU, which other programs on the machine disturb least: with more threads than
one they count waits for each other, too. Ratios are medians over rounds of ratios within a round.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import process_time

import torch
from torch import Tensor

from lab.bench.figures import Busy, Spread, about, at_least_one, plain
from rayzero.kernels.optimizer_class import path_of, plain_value
from rayzero.kernels.stamps import STAMP, TileStamps, UndoCopy
from rayzero.layout.model_layout import ModelLayout, lay_out_unit
from rayzero.owner.memory import HostMemory
from rayzero.owner.rules import ClassRule
from rayzero.owner.shard import OwnedShard, ShardWork, allocate
from rayzero.protocol.messages import Hyper, ModelSpec

CLASSES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "Muon": lambda params: torch.optim.Muon(params, lr=1e-3, adjust_lr_fn="match_rms_adamw"),
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=1e-3),
    "SGD with momentum": lambda params: torch.optim.SGD(params, lr=1e-3, momentum=0.9),
}
_NEWTON = ((3.4445, -4.775, 2.0315), 5, 1e-7)  # coefficients, steps and epsilon that Muon has by default


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The figures of one class; seconds are of one update of all matrices."""

    name: str
    plain_s: Spread
    owner_s: Spread
    owner_over_plain: Spread
    undo_share: Spread  # of the update with the copy
    products_over_undo: Spread | None  # speed of the whole update as a part of that of the products alone


class _Kept:
    """Stands for the journal of one shard in memory that outlives its owner."""

    def __init__(self, owned: OwnedShard, copy: UndoCopy) -> None:
        self._words = torch.zeros(-(-owned.shard.numel // STAMP), dtype=torch.int64, device="cpu")
        self._copy = copy

    def stamps(self, version: int) -> TileStamps:
        """See ``ShardJournal.stamps``."""
        return TileStamps(self._words, version, copy=self._copy)


class Updates:
    """The updates of an owner that has all matrices."""

    def __init__(self, cls: type[torch.optim.Optimizer], hyper: Hyper, shapes: Sequence[tuple[int, int]]) -> None:
        named = [(f"{at}.weight", shape) for at, shape in enumerate(shapes)]
        units = tuple(
            lay_out_unit(at, name, torch.bfloat16, True, [(name, shape)]) for at, (name, shape) in enumerate(named)
        )
        layout = ModelLayout(units=units, shard_numel=1 << 21, whole_parameters=True)
        groups = ((0,),) * len(units)
        spec = ModelSpec(
            run="bench", layout=layout, world_size=1, optimizer=path_of(cls), hyper=(hyper,), group_of=groups
        )
        self._rule = ClassRule(spec, cls)
        owned = allocate(spec, range(len(layout.shards)), (), HostMemory(), room=self._rule.room, splits=False)
        largest = max(_updated(shard) for shard in owned.values())
        words, kept = (
            torch.zeros(2, dtype=torch.int64, device="cpu"),
            torch.zeros(largest, dtype=torch.uint8, device="cpu"),
        )
        self._shards = list(owned.values())
        self._journals = [_Kept(shard, UndoCopy(words, kept)) for shard in self._shards]
        self._version, gradients = 0, [_drawn(shard.shard.numel).bfloat16() for shard in self._shards]
        self._work = [
            ShardWork(version=0, gradients=[gradient], contributors=((0,),), scale=1.0, hyper=(hyper,))
            for gradient in gradients
        ]

    def run(self, *, undo: bool) -> None:
        """Update every shard once. ``undo``: copy it before."""
        self._version += 1
        for owned, journal, work in zip(self._shards, self._journals, self._work, strict=True):
            owned.journal = journal if undo else None  # type: ignore[assignment]
            self._rule.update(owned, replace(work, version=self._version))
            owned.steps = [count + 1 for count in owned.steps]


def _updated(owned: OwnedShard) -> int:
    assert owned.master is not None
    assert owned.class_states is not None
    return owned.master.nbytes + owned.class_states.nbytes


def _drawn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float32, device="cpu")


def _cpu_seconds(work: Callable[[], object]) -> float:
    before = process_time()
    work()
    return process_time() - before


def shapes_of(dim: int, layers: int) -> list[tuple[int, int]]:
    """The matrices of blocks: queries, keys and values, their output, up, down."""
    return [(3 * dim, dim), (dim, dim), (4 * dim, dim), (dim, 4 * dim)] * layers


def measure_class(name: str, shapes: Sequence[tuple[int, int]], rounds: int) -> tuple[Row, Spread]:
    """The figures of a class, and the share of the machine that others took in a round."""
    params = [torch.nn.Parameter(_drawn(*shape)) for shape in shapes]
    optimizer = CLASSES[name](params)
    hyper = {key: plain_value(value, key) for key, value in optimizer.param_groups[0].items() if key != "params"}
    for param in params:
        param.grad = _drawn(*param.shape)
    momenta = [_drawn(*shape) for shape in shapes]
    updates = Updates(type(optimizer), hyper, shapes)
    work: dict[str, Callable[[], object]] = {
        "plain": optimizer.step,
        "owner": lambda: updates.run(undo=False),
        "undo": lambda: updates.run(undo=True),
    }
    if name == "Muon":
        newton = torch.optim._muon._zeropower_via_newtonschulz
        work["products"] = lambda: [newton(each, *_NEWTON) for each in momenta]
    found, taken = list[dict[str, float]](), list[float]()
    for round_ in range(rounds + 1):
        before = Busy.now(())
        seconds = {what: _cpu_seconds(each) for what, each in work.items()}
        if round_:  # the first makes states
            found.append(seconds)
            taken.append(Busy.now(()).others_since(before))
    row = Row(
        name=name,
        plain_s=Spread.of(each["plain"] for each in found),
        owner_s=Spread.of(each["owner"] for each in found),
        owner_over_plain=Spread.of(each["owner"] / each["plain"] for each in found),
        undo_share=Spread.of(1 - each["owner"] / each["undo"] for each in found),
        products_over_undo=Spread.of(each["products"] / each["undo"] for each in found) if name == "Muon" else None,
    )
    return row, Spread.of(taken)


def text_of(row: Row, others: Spread) -> str:
    """A class's figures for people."""
    products = "" if row.products_over_undo is None else f", {row.products_over_undo.text()} of the products' speed"
    return (
        f"  {row.name:18} plain {row.plain_s.text(1e3, 1)} ms, owner {row.owner_s.text(1e3, 1)} ms: "
        f"{row.owner_over_plain.text()} x plain; undo copy {row.undo_share.text(100, 1)} % of the update{products} "
        f"(others took {others.text(100, 0)} % of the machine)"
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command: measure and print."""
    made = argparse.ArgumentParser(
        prog="python -m lab classes", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--dim", type=at_least_one, default=1024, help="width of the blocks")
    made.add_argument("--layers", type=at_least_one, default=2)
    made.add_argument("--threads", type=at_least_one, default=1)
    made.add_argument("--rounds", type=at_least_one, default=9)
    made.add_argument("--json", action="store_true")
    args = made.parse_args(argv)
    facts = about() | {"dim": args.dim, "layers": args.layers, "threads": args.threads, "rounds": args.rounds}
    torch.set_num_threads(args.threads)
    rows = [measure_class(name, shapes_of(args.dim, args.layers), args.rounds) for name in CLASSES]
    if args.json:
        print(json.dumps(facts | {"rows": plain([{"others": others} | plain(row) for row, others in rows])}, indent=1))
        return
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    for row, others in rows:
        print(text_of(row, others))
