"""How a model is cut into units: the rules by example, and that every parameter is laid out exactly once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from rayzero.engine.units.partition import UnitPlan, build_layout
from rayzero.errors import ConfigError, UnsupportedError
from rayzero.layout.model_layout import ALIGN, ModelLayout
from rayzero.records import check_record


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.mlp(self.norm(x))
        return out


class GPT(nn.Module):
    def __init__(self, *, layers: int = 2, tied: bool = False) -> None:
        super().__init__()
        self.wte = nn.Embedding(100, 8)
        self.blocks = nn.ModuleList([Block(8) for _ in range(layers)])
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 100, bias=False)
        if tied:
            self.head.weight = self.wte.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.wte(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out


def names(plan: UnitPlan) -> list[str]:
    return [unit.name for unit in plan.layout.units]


def params(plan: UnitPlan) -> dict[str, list[str]]:
    return {unit.name: [slot.name for slot in unit.slots] for unit in plan.layout.units}


# ---- choosing units ---------------------------------------------------------------------------------------------


def test_auto_makes_blocks_and_large_modules_units_and_the_small_rest_the_root() -> None:
    plan = build_layout(GPT(), min_unit_bytes=1000)
    assert names(plan) == ["root", "wte", "blocks.0", "blocks.1", "head"]
    assert plan.modules == ("", "wte", "blocks.0", "blocks.1", "head")
    assert params(plan)["root"] == ["norm.weight", "norm.bias"]
    assert params(plan)["blocks.0"] == [
        f"blocks.0.{name}"
        for name in ["norm.weight", "norm.bias", "mlp.0.weight", "mlp.0.bias", "mlp.2.weight", "mlp.2.bias"]
    ]


def test_a_module_of_exactly_min_unit_bytes_stays_in_the_root() -> None:
    assert "wte" in names(build_layout(GPT(), min_unit_bytes=100 * 8 * 4 - 1))
    assert "wte" not in names(build_layout(GPT(), min_unit_bytes=100 * 8 * 4))
    # counted in the unit's dtype
    assert "wte" not in names(build_layout(GPT(), min_unit_bytes=100 * 8 * 2, compute_dtype=torch.bfloat16))


def test_a_tied_parameter_is_laid_out_once_and_its_other_module_lists_the_unit() -> None:
    plan = build_layout(GPT(tied=True), min_unit_bytes=1000)
    assert names(plan) == ["root", "wte", "blocks.0", "blocks.1"]
    assert plan.units_of_module == {"": (0,), "wte": (1,), "blocks.0": (2,), "blocks.1": (3,), "head": (1,)}


def test_parameters_tied_across_blocks_are_listed_by_both() -> None:
    model = GPT()
    model.blocks[1].mlp[0].weight = model.blocks[0].mlp[0].weight  # type: ignore[union-attr,index]
    plan = build_layout(model)
    assert params(plan)["blocks.1"] == [
        f"blocks.1.{name}" for name in ["norm.weight", "norm.bias", "mlp.0.bias", "mlp.2.weight", "mlp.2.bias"]
    ]
    assert plan.units_of_module["blocks.1"] == (2, 1)


class Uses(nn.Module):
    """Has a forward, and uses what is in its list without calling it."""

    def __init__(self, entries: nn.Module) -> None:
        super().__init__()
        self.entries = entries

    def forward(self, x: Tensor) -> Tensor:
        return x


def holds(**parts: nn.Module) -> nn.Module:
    """A module without a forward."""
    model = nn.Module()
    for name, part in parts.items():
        model.add_module(name, part)
    return model


def linears(count: int) -> list[nn.Module]:
    return [nn.Linear(2, 2) for _ in range(count)]


CUTS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], list[str]]] = {
    "large modules inside a block do not split it": (
        GPT,
        {"min_unit_bytes": 1},
        ["wte", "blocks.0", "blocks.1", "norm", "head"],
    ),
    "nor does a list inside it": (
        lambda: holds(layers=nn.ModuleList(Uses(nn.ModuleList(linears(3))) for _ in range(2))),
        {},
        ["layers.0", "layers.1"],
    ),
    "entries without a forward are looked into": (
        lambda: holds(
            stages=nn.ModuleList([nn.ModuleList(linears(2)), nn.ModuleDict({"a": Block(2)})]),
            weights=nn.ParameterList([torch.zeros(3)]),
        ),
        {},
        ["root", "stages.0.0", "stages.0.1", "stages.1.a"],
    ),
    "a list of parameters counts for the module that uses it": (
        lambda: holds(bank=Uses(nn.ParameterList([torch.zeros(300) for _ in range(2)]))),
        {"min_unit_bytes": 2000},
        ["bank"],
    ),
    "a sequential model is cut into its entries": (
        lambda: nn.Sequential(*linears(1), nn.ReLU(), *linears(1)),
        {},
        ["0", "2"],
    ),
    "a module called root is not the root unit": (
        lambda: holds(root=nn.Linear(4, 4), other=nn.Linear(4, 4)),
        {"units": lambda name, module: name == "root"},
        ["<root>", "root"],
    ),
}


@pytest.mark.parametrize("what", CUTS)
def test_a_model_is_cut(what: str) -> None:
    build, settings, expected = CUTS[what]
    assert names(build_layout(build(), **settings)) == expected


def test_a_module_registered_twice_is_one_unit() -> None:
    shared = Block(4)
    model = nn.Module()
    model.blocks = nn.ModuleList([shared, Block(4), shared])
    plan = build_layout(model)
    assert names(plan) == ["blocks.0", "blocks.1"]
    assert plan.units_of_module == {"blocks.0": (0,), "blocks.1": (1,)}


def test_class_names_and_functions_choose_units() -> None:
    by_class = build_layout(GPT(), units=["Block", "Embedding"], min_unit_bytes=1)
    assert names(by_class) == ["root", "wte", "blocks.0", "blocks.1"]
    by_function = build_layout(GPT(), units=lambda name, module: isinstance(module, nn.Linear) and "mlp" in name)
    assert names(by_function) == ["root", "blocks.0.mlp.0", "blocks.0.mlp.2", "blocks.1.mlp.0", "blocks.1.mlp.2"]
    nested = build_layout(GPT(layers=1), units=["Block", "LayerNorm"])
    assert params(nested)["blocks.0.norm"] == ["blocks.0.norm.weight", "blocks.0.norm.bias"]
    assert params(nested)["blocks.0"][0] == "blocks.0.mlp.0.weight"


# ---- dtypes, frozen ---------------------------------------------------------------------------------------------


def test_mixed_modules_have_sibling_units() -> None:
    model = GPT()
    model.blocks[1].requires_grad_(False)
    model.blocks[0].mlp[0].bias.requires_grad_(False)  # type: ignore[union-attr,index]
    plan = build_layout(model, compute_dtype=torch.bfloat16, keep_fp32=["*norm"], min_unit_bytes=1000)
    described = [
        (u.name, module, u.dtype, u.trainable) for u, module in zip(plan.layout.units, plan.modules, strict=True)
    ]
    f32, bf16 = torch.float32, torch.bfloat16
    assert described == [
        ("root:float32", "", f32, True),
        ("wte", "wte", bf16, True),
        ("blocks.0", "blocks.0", bf16, True),
        ("blocks.0:float32", "blocks.0", f32, True),
        ("blocks.0:frozen:master", "blocks.0", bf16, False),
        ("blocks.1:frozen:float32", "blocks.1", f32, False),
        ("blocks.1:frozen:master", "blocks.1", bf16, False),
        ("head", "head", bf16, True),
    ]
    assert plan.units_of_module["blocks.0"] == (2, 3, 4)


def test_frozen_parameters_that_would_be_rounded_are_units_with_a_master() -> None:
    model = GPT().requires_grad_(False)
    model.blocks[1].to(torch.bfloat16)
    model.blocks[0].mlp[0].bias.data = model.blocks[0].mlp[0].bias.data.to(torch.bfloat16)  # type: ignore[union-attr,index]
    plan = build_layout(model, compute_dtype=torch.bfloat16, units=["Block"])
    described = {unit.name: (unit.frozen_master, unit.initial_dtype) for unit in plan.layout.units}
    f32, bf16 = torch.float32, torch.bfloat16
    assert described == {
        "root:frozen:master": (True, f32),
        "blocks.0:frozen": (False, bf16),
        "blocks.0:frozen:master": (True, f32),
        "blocks.1:frozen": (False, bf16),
    }
    layout = plan.layout
    assert check_record(layout.to_json(), ModelLayout) == layout
    without = build_layout(model, compute_dtype=torch.bfloat16, units=["Block"], frozen_codec="bf16").layout
    assert [unit.name for unit in without.units] == ["root:frozen", "blocks.0:frozen", "blocks.1:frozen"]
    assert not any(unit.has_master or "frozen_master" in str(unit_json) for unit, unit_json in zip(
        without.units, without.to_json()["units"], strict=True
    ))  # fmt: skip


@pytest.mark.parametrize(
    ("values", "computed", "rounds"),
    [
        (torch.float32, torch.bfloat16, True),
        (torch.float32, torch.float16, True),
        (torch.float16, torch.bfloat16, True),
        (torch.bfloat16, torch.float16, True),
        (torch.bfloat16, torch.bfloat16, False),
        (torch.float16, torch.float16, False),
        (torch.bfloat16, torch.float32, False),
        (torch.float32, torch.float32, False),
    ],
)
def test_a_master_is_kept_where_the_compute_dtype_holds_less(
    values: torch.dtype, computed: torch.dtype, rounds: bool
) -> None:
    model = nn.Linear(4, 4).to(values).requires_grad_(False)
    (unit,) = build_layout(model, compute_dtype=computed).layout.units
    assert unit.frozen_master == rounds


def test_keep_fp32_covers_the_modules_inside_a_match() -> None:
    plan = build_layout(GPT(), compute_dtype=torch.bfloat16, keep_fp32=["blocks.0"])
    assert {unit.name: unit.dtype for unit in plan.layout.units}["blocks.0:float32"] is torch.float32
    assert "blocks.0" not in names(plan)


def test_without_a_lower_precision_nothing_is_kept_apart() -> None:
    assert names(build_layout(GPT(), keep_fp32=["*norm"])) == names(build_layout(GPT()))


# ---- every parameter once ---------------------------------------------------------------------------------------


@given(
    st.lists(st.lists(st.integers(0, 90), max_size=3), min_size=1, max_size=5),
    st.lists(st.booleans(), min_size=5, max_size=5),
    st.sampled_from([256, 512, 4096]),
    st.sampled_from([1, 300, 10**6]),
)
def test_every_parameter_is_in_exactly_one_unit_and_its_bytes_in_exactly_one_shard(
    shapes: list[list[int]], frozen: list[bool], shard_bytes: int, min_unit_bytes: int
) -> None:
    model = nn.Module()
    model.blocks = nn.ModuleList()
    for i, shape in enumerate(shapes):
        holder = (nn.Linear(2, 2, bias=False), nn.Identity())[i % 2]
        holder.extra = nn.Parameter(torch.zeros(shape), requires_grad=not frozen[i])
        (model.blocks.append if i % 3 else lambda m: setattr(model, "single", m))(holder)
    layout = build_layout(model, shard_bytes=shard_bytes, min_unit_bytes=min_unit_bytes).layout
    slots = [slot for unit in layout.units for slot in unit.slots]
    assert sorted(slot.name for slot in slots) == sorted(name for name, _ in model.named_parameters())
    assert {slot.name: slot.shape for slot in slots} == {n: tuple(p.shape) for n, p in model.named_parameters()}
    for unit in layout.units:
        trained = {model.get_parameter(slot.name).requires_grad for slot in unit.slots}
        assert trained == {unit.trainable}
        assert_slots_and_shards_cover(layout, unit.index)


def assert_slots_and_shards_cover(layout: ModelLayout, index: int) -> None:
    """Slots are aligned and disjoint; the unit's shards hold each parameter element exactly once, in order."""
    unit, shards = layout.units[index], layout.shards_by_unit[index]
    for before, slot in zip([None, *unit.slots], unit.slots, strict=False):
        assert slot.start % ALIGN == 0
        assert slot.start == (before.padded_stop if before else 0)
    assert [s.start for s in shards] == list(range(0, unit.numel, layout.shard_numel))
    held: dict[int, list[tuple[int, int]]] = {}
    for shard in shards:
        for part in layout.slices(shard):
            held.setdefault(part.slot, []).append((part.param_start, part.param_start + part.numel))
    for i, slot in enumerate(unit.slots):
        pieces = held.get(i, [])
        assert [stop for _, stop in pieces[:-1]] == [start for start, _ in pieces[1:]]
        assert (pieces[0][0], pieces[-1][1]) == (0, slot.numel) if slot.numel else pieces == []


def test_the_layout_does_not_depend_on_values_or_device() -> None:
    with torch.device("meta"):
        on_meta = build_layout(GPT(), min_unit_bytes=1000)
    assert on_meta == build_layout(GPT(), min_unit_bytes=1000)
    assert on_meta.layout.digest == build_layout(GPT(), min_unit_bytes=1000).layout.digest
    assert on_meta.layout.digest != build_layout(GPT(tied=True), min_unit_bytes=1000).layout.digest


def test_scalars_and_empty_parameters_have_slots() -> None:
    model = nn.Module()
    model.scale = nn.Parameter(torch.tensor(1.0))
    model.nothing = nn.Parameter(torch.zeros(0, 3))
    unit = build_layout(model).layout.units[0]
    assert [(slot.name, slot.shape, slot.numel) for slot in unit.slots] == [("scale", (), 1), ("nothing", (0, 3), 0)]
    assert unit.numel == ALIGN


# ---- refusals ---------------------------------------------------------------------------------------------------


def holding(parameter: Any, **more: Any) -> nn.Module:
    model = nn.Module()
    model.inner = nn.Module()
    model.inner.bad = parameter
    for name, value in more.items():
        setattr(model, name, value)
    return model


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: nn.Parameter(torch.zeros(2, dtype=torch.complex64)), "complex64.*real"),
        (lambda: nn.Parameter(torch.zeros(2, dtype=torch.float64)), "float64.*float32"),
        (lambda: nn.Parameter(torch.zeros(1).expand(4)), "expanded.*clone"),
        (lambda: nn.Parameter(torch.eye(3).to_sparse()), "layout torch.sparse_coo"),
        (lambda: nn.LazyLinear(3).weight, "not initialized"),
    ],
)
def test_a_parameter_that_cannot_be_laid_out_is_refused_by_name(make: Callable[[], nn.Parameter], why: str) -> None:
    with pytest.raises(UnsupportedError, match=f"'inner.bad'.*{why}"):
        build_layout(holding(make()))


def test_overlapping_parameters_are_refused_by_name() -> None:
    whole = torch.zeros(6, 4)
    with pytest.raises(UnsupportedError, match=r"'other' and 'inner.bad' overlap"):
        build_layout(holding(nn.Parameter(whole[2:]), other=nn.Parameter(whole[:3])))
    with pytest.raises(UnsupportedError, match="overlap"):
        build_layout(holding(nn.Parameter(whole[:, 1:]), other=nn.Parameter(whole[:, :2])))
    with pytest.raises(UnsupportedError, match="overlap"):
        build_layout(holding(nn.Parameter(whole.view(torch.bfloat16)[:1]), other=nn.Parameter(whole[:1])))


def test_views_of_one_tensor_that_share_no_element_are_fine() -> None:
    whole = torch.zeros(6, 4)
    build_layout(holding(nn.Parameter(whole[3:]), other=nn.Parameter(whole[:3])))
    build_layout(holding(nn.Parameter(whole[:, 2:]), other=nn.Parameter(whole[:, :2])))


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"units": ["Blok"]}, "'Blok'.*nearest is 'Block'"),
        ({"units": ["ModuleList"]}, "'blocks' cannot be a unit: a ModuleList has no forward"),
        ({"units": "Block"}, "units is 'Block'"),
        ({"keep_fp32": ["nrm"]}, "'nrm' matches no module.*'norm'"),
        ({"shard_bytes": 100}, "multiple of 256"),
        ({"compute_dtype": torch.float64}, "float64"),
    ],
)
def test_settings_that_match_nothing_are_errors(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        build_layout(GPT(), **settings)


def test_a_model_without_parameters_is_an_error() -> None:
    with pytest.raises(ConfigError, match="Identity has no parameters"):
        build_layout(nn.Identity())
