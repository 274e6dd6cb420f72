"""State in torch's own format: out, in, between fractions, and what loading weights alone does."""

from __future__ import annotations

import io
import itertools

import pytest
import torch
from torch import nn

from rayzero import HybridDeviceOptimizer
from rayzero.errors import ConfigError, UnsupportedError
from tests.hybrid.models import backward, equal, net, states_equal, train, weights

ADAMW = {"lr": 1e-2, "weight_decay": 0.1}


def hybrid_of(model: nn.Module, fraction: float = 0.5, **options) -> HybridDeviceOptimizer:
    return HybridDeviceOptimizer(model.parameters(), fraction, bucket_bytes=4096, **{**ADAMW, **options})


def plain_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)


def saved(optimizer: torch.optim.Optimizer) -> dict:
    """Through a file, which only plain tensors and numbers pass."""
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


MAKERS = {
    "plain": plain_of,
    "none": lambda model: hybrid_of(model, 0.0),
    "some": lambda model: hybrid_of(model, 0.37),
    "all": lambda model: hybrid_of(model, 1.0),
}


@pytest.mark.parametrize(("source", "target"), list(itertools.permutations(MAKERS, 2)))
def test_a_run_goes_on_where_another_optimizer_stopped(source, target):
    straight = net()
    want = train(straight, plain_of(straight), 5)
    first = net()
    train(first, begun := MAKERS[source](first), 3)
    second = net()
    resumed = MAKERS[target](second)
    resumed.load_state_dict(saved(begun))
    second.load_state_dict(first.state_dict())  # in this order too
    assert equal(train(second, resumed, 2, first=3), want)


def test_keys_shapes_and_numbers_are_torchs():
    model, twin = net(), net()
    hybrid, reference = hybrid_of(model), plain_of(twin)
    train(model, hybrid, 2), train(twin, reference, 2)
    ours, theirs = hybrid.state_dict(), reference.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    for index, state in theirs["state"].items():
        assert {k: (v.shape, v.dtype) for k, v in state.items()} == {
            k: (v.shape, v.dtype) for k, v in ours["state"][index].items()
        }


def test_loading_copies():
    model, twin = net(), net()
    hybrid, other = hybrid_of(model), hybrid_of(twin, 0.2)
    train(model, hybrid, 2)
    other.load_state_dict(hybrid.state_dict())
    before = [value.clone() for state in hybrid.state.values() for value in state.values()]
    train(twin, other, 2)
    assert equal([value for state in hybrid.state.values() for value in state.values()], before)


@pytest.mark.promise("recoverable", "hybrid")
@pytest.mark.parametrize("fraction", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("state_first", [False, True])
def test_fp32_masters_survive_a_restart_bit_by_bit(state_first, fraction):
    """A 16-bit model with one fp32 parameter: the master of the weight is there, the fp32 one needs none."""

    def mixed() -> nn.Module:
        model = net(torch.bfloat16)
        model[5].float()
        return model

    class Casting(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner[5](self.inner[:5](x).float())

    def made(fraction: float):
        model = Casting(mixed())
        return model, hybrid_of(model, fraction, param_update_in_fp32=True)

    straight, optimizer = made(0.7)
    want = train(straight, optimizer, 5)
    first, begun = made(1.0)
    train(first, begun, 3)
    state = saved(begun)
    assert set(state["state"]) == set(range(7))
    assert ["master_param" in state["state"][i] for i in range(7)] == [True] * 6 + [False]
    second, resumed = made(fraction)
    acts = [lambda: second.load_state_dict(first.state_dict()), lambda: resumed.load_state_dict(state)]
    for act in reversed(acts) if state_first else acts:
        act()
    assert all(
        torch.equal(state["state"][i]["master_param"], resumed.state[param]["master_param"])
        for i, param in enumerate(list(second.parameters())[:6])
    )
    assert equal(train(second, resumed, 2, first=3), want)


@pytest.mark.parametrize("fp32", [False, True])
@pytest.mark.parametrize("fraction", [0.0, 0.4, 1.0])
def test_weights_that_are_loaded_alone_are_what_the_next_step_starts_from(fraction, fp32):
    dtype = torch.bfloat16 if fp32 else torch.float32
    model, twin = net(dtype), net(dtype)
    train(model, hybrid_of(model), 2)
    new = model.state_dict()
    third = net(dtype)
    hybrid = hybrid_of(third, fraction, param_update_in_fp32=fp32)
    third.load_state_dict(new)
    twin.load_state_dict(new)
    fresh = hybrid_of(twin, fraction, param_update_in_fp32=fp32)
    assert equal(train(third, hybrid), train(twin, fresh))


def test_writes_by_hand_between_steps_are_followed():
    model, twin = net(), net()
    hybrid, reference = hybrid_of(model), plain_of(twin)
    for each, optimizer in ((model, hybrid), (twin, reference)):
        for step in range(3):
            train(each, optimizer, 1, first=step)
            with torch.no_grad():
                for param in each.parameters():
                    param.clamp_(-0.1, 0.1)
            each[0].bias.data = torch.full_like(each[0].bias, 0.05 * step)
    assert equal(weights(model), weights(twin))


def test_writes_that_torch_does_not_count_need_refresh_masters():
    model, twin = net(), net()
    hybrid, reference = hybrid_of(model, 1.0), plain_of(twin)
    for each, optimizer in ((model, hybrid), (twin, reference)):
        train(each, optimizer, 1)
        each[0].weight.data.mul_(0.5)
    hybrid.refresh_masters()
    assert equal(train(model, hybrid, 1, first=1), train(twin, reference, 1, first=1))


def test_hooks_run_as_in_torch():
    model = net()
    hybrid = hybrid_of(model)
    seen = []
    hybrid.register_state_dict_pre_hook(lambda o: seen.append("before save"))
    hybrid.register_state_dict_post_hook(lambda o, s: seen.append("after save"))
    hybrid.register_load_state_dict_pre_hook(lambda o, s: {**s, "param_groups": [dict(s["param_groups"][0], lr=7.0)]})
    hybrid.register_load_state_dict_post_hook(lambda o: seen.append("after load"))
    hybrid.register_step_pre_hook(lambda o, a, k: seen.append("before step"))
    train(model, hybrid, 1)
    hybrid.load_state_dict(hybrid.state_dict())
    assert seen == ["before step", "before save", "after save", "after load"]
    assert hybrid.param_groups[0]["lr"] == 7.0


@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_dummy_step_makes_every_state_and_leaves_weights(cls):
    model, twin = net(), net()
    hybrid = HybridDeviceOptimizer(
        model.parameters(), 0.5, cls, lr=0.1, **({"momentum": 0.9} if cls is torch.optim.SGD else {})
    )
    before = weights(model)
    hybrid.dummy_step()
    assert equal(weights(model), before)
    template = hybrid.state_dict()["state"]
    assert set(template) == set(range(7))
    assert all(float(state["step"]) == 0 for state in template.values() if "step" in state)
    fresh = HybridDeviceOptimizer(
        twin.parameters(), 0.5, cls, lr=0.1, **({"momentum": 0.9} if cls is torch.optim.SGD else {})
    )
    assert equal(train(model, hybrid), train(twin, fresh))


def test_distributed_checkpoints_state_dict_functions_work():
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    straight = net()
    want = train(straight, plain_of(straight), 4)
    first, second = net(), net()
    train(first, begun := hybrid_of(first), 2)
    state = get_optimizer_state_dict(first, begun)
    resumed = hybrid_of(second, 0.2)
    second.load_state_dict(first.state_dict())
    set_optimizer_state_dict(second, resumed, state)
    assert equal(train(second, resumed, 2, first=2), want)


def test_states_that_do_not_fit_are_refused():
    model = net()
    hybrid = hybrid_of(model)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    backward(model, 0)
    sgd.step()
    with pytest.raises(ConfigError, match="has no step, exp_avg, exp_avg_sq"):
        hybrid.load_state_dict(sgd.state_dict())
    other = torch.optim.AdamW(list(model.parameters())[:3])
    with pytest.raises(ValueError, match=r"groups of \[3\] parameters, this optimizer of \[7\]"):
        hybrid.load_state_dict(other.state_dict())
    with pytest.raises(UnsupportedError, match="load_state_dict"):
        hybrid.state = {1: 2}


# ---- moving -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fraction_moves_at_run_time_without_changing_a_bit(dtype):
    model, twin = net(dtype), net(dtype)
    hybrid = hybrid_of(model, 0.5, param_update_in_fp32=True)
    fixed = hybrid_of(twin, 1.0, param_update_in_fp32=True)
    for step, fraction in enumerate([0.0, 1.0, 0.3, 0.9, 0.5]):
        reached = hybrid.set_offload_fraction(fraction)
        assert reached == pytest.approx(fraction, abs=0.01)
        train(model, hybrid, 1, first=step), train(twin, fixed, 1, first=step)
    assert equal(weights(model), weights(twin))
    assert states_equal(hybrid, fixed)


@pytest.mark.promise("observable", "hybrid")
def test_placement_says_what_lives_where():
    model = net()
    total = sum(param.nbytes for param in model.parameters())
    hybrid = hybrid_of(model, 0.5, param_update_in_fp32=True)
    train(model, hybrid, 1)
    found = hybrid.placement()
    assert found.offloaded_bytes + found.device_bytes == total
    assert found.device_memory_bytes - 2 * found.device_bytes in range(1, 4 * 8)  # two moments; a step count each
    assert found.host_memory_bytes >= 4 * found.offloaded_bytes  # master, gradient, two moments


@pytest.mark.promise("bounded", "hybrid")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("budget", [0, 10_000, 20_000, 1 << 20])
def test_a_device_memory_budget_holds(budget, dtype):
    model, twin = net(dtype), net(dtype)
    options = {"param_update_in_fp32": True}
    hybrid = hybrid_of(model, 0.0, device_memory_budget=budget, **options)
    got = train(model, hybrid, 2)
    per_element = 8 if dtype is torch.float32 else 12
    elements = hybrid.placement().device_bytes // dtype.itemsize
    total = sum(param.numel() for param in model.parameters())
    assert elements * per_element <= budget
    assert elements == total or elements * per_element > budget - 64 * per_element
    assert equal(got, train(twin, hybrid_of(twin, 0.0, **options), 2))


def test_a_measured_fraction_changes_no_bit_and_moves():
    model, twin = net(), net()
    hybrid = HybridDeviceOptimizer(model.parameters(), "measured", **ADAMW)
    assert hybrid.placement().offload_fraction == pytest.approx(0.5, abs=0.01)
    noted = []

    def note(fraction: float, busy_s: float, stall_s: float) -> float | None:
        noted.append((fraction, busy_s > 0, stall_s > 0))
        return 0.8 if len(noted) == 3 else None

    hybrid._search.note = note  # type: ignore[method-assign]
    got = train(model, hybrid, 5)
    assert equal(got, train(twin, plain_of(twin), 5))
    assert hybrid.placement().offload_fraction == pytest.approx(0.8, abs=0.01)
    assert noted[1] == (0.5, True, True)


def test_a_group_is_added_while_training():
    def run(make) -> tuple:
        model = net()
        params = list(model.parameters())
        optimizer = make(params[:4])
        train(model, optimizer, 2)
        optimizer.add_param_group({"params": params[4:], "lr": 0.05})
        return train(model, optimizer, 2, first=2), optimizer

    got, hybrid = run(lambda params: HybridDeviceOptimizer(params, 0.5, **ADAMW))
    want, reference = run(lambda params: torch.optim.AdamW(params, fused=True, **ADAMW))
    assert equal(got, want)
    assert states_equal(hybrid, reference)
    assert hybrid.placement().offload_fraction == pytest.approx(0.5, abs=0.01)


class Warming(torch.optim.Optimizer):
    """Its step writes into its groups: a count that it makes, a number or a tensor, and a rate by it."""

    def __init__(self, params, lr=0.1, tensor=False):
        super().__init__(params, {"lr": lr, "tensor": tensor})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            if "count" not in group:
                group["count"] = torch.tensor(0, dtype=torch.int32) if group["tensor"] else 0
            group["count"] += 1
            group["scheduled"] = group["lr"] / int(group["count"])
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(param.grad, alpha=-group["scheduled"])


def _entries(optimizer: torch.optim.Optimizer) -> list[dict]:
    return [
        {key: value for key, value in group.items() if key != "params"} for group in saved(optimizer)["param_groups"]
    ]


@pytest.mark.parametrize("tensor", [False, True])
@pytest.mark.parametrize("fraction", [0.0, 0.37, 1.0])
def test_what_a_class_adds_to_its_groups_is_in_the_state(fraction, tensor):
    def made(model):
        return HybridDeviceOptimizer(model.parameters(), fraction, Warming, bucket_bytes=4096, tensor=tensor)

    straight = net()
    want = train(straight, plain := Warming(straight.parameters(), tensor=tensor), 5)
    first = net()
    train(first, begun := made(first), 3)
    half = net()
    train(half, stopped := Warming(half.parameters(), tensor=tensor), 3)
    assert _entries(begun) == _entries(stopped)
    assert begun.param_groups[0]["count"] == 3
    for make in (made, lambda model: Warming(model.parameters(), tensor=tensor)):
        second = net()
        resumed = make(second)
        resumed.load_state_dict(saved(begun))
        second.load_state_dict(first.state_dict())
        assert equal(train(second, resumed, 2, first=3), want)
        assert _entries(resumed) == _entries(plain)


@pytest.mark.parametrize("tensor", [False, True])
def test_what_a_class_adds_to_its_groups_moves_with_the_fraction(tensor):
    straight, moved = net(), net()
    want = train(straight, Warming(straight.parameters(), tensor=tensor), 5)
    optimizer = HybridDeviceOptimizer(moved.parameters(), 0.2, Warming, bucket_bytes=4096, tensor=tensor)
    train(moved, optimizer, 3)
    optimizer.set_offload_fraction(0.8)
    assert equal(train(moved, optimizer, 2, first=3), want)
