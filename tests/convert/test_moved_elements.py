"""What a function does to tensors is traced without values, and read in pieces from where the elements lie."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor

from rayzero.convert import translation
from rayzero.convert.formats.content import Content, Reader, WeightDecl
from rayzero.convert.translated_reader import TranslatedReader
from rayzero.convert.translation import Strided, Trace, Translation, no_values
from rayzero.errors import UnsupportedError

SHAPES = {"a": (6, 8), "b": (6, 8), "c": (4, 3, 5), "d": (1, 7), "e": (8, 2, 3, 2, 2), "f": (0, 8)}
Given = Mapping[str, Tensor]

MOVES: Mapping[str, Callable[[Given], Tensor]] = {
    "experts, stacked": lambda t: torch.stack([t["a"], t["b"]]),
    "stacked inside": lambda t: torch.stack([t["a"], t["b"]], dim=1),
    "gate and up": lambda t: torch.cat([torch.stack([t["a"], t["b"]]), torch.stack([t["b"], t["a"]])], dim=1),
    "joined rows, one empty": lambda t: torch.cat([t["a"], t["f"], t["b"]]),
    "transposed": lambda t: t["a"].T.contiguous(),
    "transposed copy with its strides": lambda t: t["a"].T.clone(),
    "transposed, then joined": lambda t: torch.cat([t["a"].T, t["b"].T], dim=1),
    "a chunk of a join": lambda t: torch.chunk(torch.cat([t["a"], t["b"]], 1), 4, dim=1)[1].contiguous().T,
    "interleaved": lambda t: t["a"].reshape(3, 2, 8).transpose(0, 1).reshape(6, 8).contiguous(),
    "interleaved inside": lambda t: torch.stack([t["a"], t["b"]]).reshape(2, 3, 2, 8).transpose(1, 2).reshape(2, 6, 8),
    "turned": lambda t: t["c"].permute(2, 0, 1).contiguous(),
    "a part, turned": lambda t: t["c"][1:3, :, 2:4].transpose(0, 1),
    "columns": lambda t: t["a"][:, 1::3],
    "heads permuted": lambda t: t["a"].view(2, 3, 2, 4).transpose(1, 2).reshape(6, 8),
    "squeezed": lambda t: t["d"].squeeze(0),
    "flattened": lambda t: t["e"].reshape(8, -1),
    "unbound": lambda t: torch.unbind(torch.stack([t["a"], t["b"]]), 1)[2],
    "repeated": lambda t: t["d"].expand(3, 7).contiguous(),
    "empty": lambda t: t["f"].T,
}


def values() -> dict[str, Tensor]:
    return {name: torch.randn(shape) for name, shape in SHAPES.items()}


def traced(move: Callable[[Given], Tensor], given: Given) -> Strided:
    trace = Trace()
    stands_for = {
        name: trace.tensor(name, WeightDecl(tuple(t.shape), "float32"), lambda a, b, t=t: t.reshape(-1)[a:b])
        for name, t in given.items()
    }
    with trace:
        made = move(stands_for)
    elements = trace.elements(made)
    assert elements.shape == tuple(move(given).shape)
    return elements


@pytest.mark.parametrize("run", [1, 3, 512])
@pytest.mark.parametrize("name", MOVES)
def test_every_range_of_moved_elements_is_what_torch_makes(
    name: str, run: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(translation, "_RUN", run)
    given = values()
    expected = MOVES[name](given).reshape(-1)
    elements = traced(MOVES[name], given)
    size = expected.numel()
    ranges = [sorted(random.Random(seed).choices(range(size + 1), k=2)) for seed in range(40)]
    for start, stop in [(0, size), *ranges]:
        assert torch.equal(elements.read(start, stop), expected[start:stop]), (start, stop)
    for index in range(size):
        held, place = elements.locate(index)
        assert given[held].reshape(-1)[place] == expected[index]


def test_a_merge_of_long_rows_reads_each_element_once_and_nothing_else() -> None:
    """Experts that are stacked and joined are read in the pieces that are asked for, never whole."""
    given = {f"{kind}.{i}": torch.randn(4, 600) for kind in ("gate", "up") for i in range(3)}
    read: list[tuple[str, int, int]] = []

    def noting(name: str, tensor: Tensor) -> Callable[[int, int], Tensor]:
        return lambda a, b: (read.append((name, a, b)), tensor.reshape(-1)[a:b])[1]

    trace = Trace()
    stands_for = {n: trace.tensor(n, WeightDecl((4, 600), "float32"), noting(n, t)) for n, t in given.items()}
    with trace:
        stacks = [torch.stack([stands_for[f"{kind}.{i}"] for i in range(3)]) for kind in ("gate", "up")]
        made = torch.cat(stacks, dim=1)
    elements = trace.elements(made)
    pieces = [elements.read(start, min(start + 1000, made.numel())) for start in range(0, made.numel(), 1000)]
    expected = torch.cat([torch.stack([given[f"{kind}.{i}"] for i in range(3)]) for kind in ("gate", "up")], dim=1)
    assert torch.equal(torch.cat(pieces), expected.reshape(-1))
    assert max(stop - start for _, start, stop in read) <= 1000
    assert sum(stop - start for _, start, stop in read) == made.numel()


def test_a_transposed_matrix_is_read_once_for_all_its_pieces_and_let_go() -> None:
    given = {"a": torch.randn(40, 50)}
    reads: list[int] = []
    trace = Trace()
    stands_for = trace.tensor(
        "a", WeightDecl((40, 50), "float32"), lambda a, b: (reads.append(b - a), given["a"].reshape(-1)[a:b])[1]
    )
    with trace:
        made = stands_for.T.contiguous()
    elements = trace.elements(made)
    pieces = [elements.read(start, start + 100) for start in range(0, 2000, 100)]
    assert torch.equal(torch.cat(pieces), given["a"].T.reshape(-1))
    assert reads == [2000]
    assert all(block._block is None for block in (elements, elements.base) if isinstance(block, Strided))


@pytest.mark.parametrize(
    ("compute", "says"),
    [
        (lambda t: t["a"] * 2, "mul makes values"),
        (lambda t: t["a"].add_(1), "add_ writes values"),
        (lambda t: t["a"].to(torch.bfloat16), "_to_copy makes values"),
        (lambda t: torch.cat([t["a"], torch.zeros(1, 8, device="meta")]), "zeros makes values"),
    ],
    ids=["arithmetic", "in place", "another dtype", "new values"],
)
def test_what_does_more_than_move_is_refused_by_name(compute: Callable[[Given], Tensor], says: str) -> None:
    with pytest.raises(UnsupportedError, match=says):
        traced(compute, values())


def test_tensors_of_several_dtypes_are_joined_in_the_wider_one() -> None:
    given = {"a": torch.randn(5, dtype=torch.bfloat16), "b": torch.randn(5)}
    trace = Trace()
    stands_for = [
        trace.tensor(name, WeightDecl((5,), dtype), lambda a, b, name=name: given[name][a:b])
        for name, dtype in (("a", "bfloat16"), ("b", "float32"))
    ]
    with trace:
        made = torch.cat(stands_for)
    assert torch.equal(trace.elements(made).read(2, 8), torch.cat(list(given.values()))[2:8])


class Source(Reader):
    """Buffers alone, which nobody reads."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__("here")
        self.content = Content(params={}, buffers=dict.fromkeys(names, WeightDecl((1,), "int64")))

    def read(self, name: str, kind: str, start: int, stop: int) -> Tensor:
        raise AssertionError


def test_buffers_under_other_names_stay_in_their_order() -> None:
    names = [f"layers.{number}.count" for number in range(50)]
    elements = {
        f"model.{name}": Strided(translation.HeldElements(name, partial(no_values, name)), (1,), (1,), 0)
        for name in names
    }
    made = Translation(decls=dict.fromkeys(elements, WeightDecl((1,), "int64")), elements=elements)
    assert list(TranslatedReader(Source(names), made).content.buffers) == list(elements)
