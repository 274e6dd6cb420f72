"""Gradients are what they are without offload, whatever happens between forward and backward."""

from __future__ import annotations

import copy
import gc
import pickle
import threading

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from rayzero.activations import ActivationOffload, OffloadPolicy, ledger
from rayzero.activations.attach import match_modules
from rayzero.activations.group import ChunkKey
from rayzero.errors import ConfigError, RayZeroError, UnsupportedError
from rayzero.telemetry.names import ACTIVATION_BYTES
from rayzero.telemetry.recorder import MemoryRecorder
from tests.activations.models import Exps, Transformer, equal, gradients, transformer
from tests.support.watched_lane import WatchedLane

BLOCKS = {"attn": "layers.*.attn", "mlp": "layers.*.mlp"}


def small(**kwargs) -> OffloadPolicy:
    return OffloadPolicy(**{"min_bytes": 1024, "poison": True, "margin": 0} | kwargs)


def hidden(batch: int = 4, length: int = 16, seed: int = 9) -> torch.Tensor:
    return torch.randn(batch, length, 64, generator=torch.Generator().manual_seed(seed))


def everything_is_back(offload: ActivationOffload) -> bool:
    found = offload.summary()
    return found.device_bytes == 0 and found.host["in_use_bytes"] == 0 and not offload._entries


@pytest.mark.parametrize("fraction", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("margin", [0, 1])
@pytest.mark.parametrize("max_in_flight", [None, 0, 1])
def test_gradients_are_bit_equal_from_the_first_step(fraction, margin, max_in_flight):
    model, x = transformer(), hidden()
    want = gradients(model, x)
    policy = small(fraction=fraction, margin=margin, max_in_flight=max_in_flight)
    with ActivationOffload(model, policy, offload_modules=BLOCKS) as offload:
        assert all(equal(gradients(model, x), want) for _ in range(3))
        assert everything_is_back(offload)
        moved = offload.summary().offloaded_bytes
        assert (moved > 0) == (fraction > 0)
    assert equal(gradients(model, x), want)
    assert offload.summary().offloaded_bytes == moved  # the hooks are gone


@pytest.mark.promise("bounded", "activations")
def test_device_memory_of_what_left_is_really_free():
    seen: list[StorageWeakRef] = []
    x = torch.randn(1000, requires_grad=True)
    with ActivationOffload(nn.Identity(), small(max_in_flight=0)) as offload:
        with offload.group("exp"):
            y = x.exp()
        seen.append(StorageWeakRef(y.untyped_storage()))
        z = y.sum()
        del y
        assert seen[0].expired()
        z.backward()
    assert torch.equal(x.grad, x.detach().exp())


def test_peak_saved_bytes_fall_to_those_coming_back():
    count, nbytes = 8, 4000
    model, x = Exps(count), torch.randn(1000, requires_grad=True)

    def peak(**kwargs) -> int:
        with ActivationOffload(model, small(max_in_flight=0, **kwargs), offload_modules=["steps.*"]) as offload:
            for _ in range(2):
                offload.reset_peak()
                model(x).sum().backward()
            return offload.summary().peak_device_bytes

    assert peak(fraction=0.0) == count * nbytes
    # Forward holds one group until it has left; backward the group it reads and `prefetch` ahead of it.
    assert peak(prefetch=0) == 1 * nbytes
    assert peak(prefetch=1) == 2 * nbytes
    assert peak(prefetch=2, margin=3) == 3 * nbytes + 2 * nbytes


def test_parameters_buffers_marked_and_foreign_tensors_stay():
    model = nn.Linear(64, 64)
    model.register_buffer("table", torch.randn(64, 64))
    offload = ActivationOffload(model, small(max_in_flight=0))
    x = torch.randn(64, 64, requires_grad=True)
    marked = torch.randn(64, 64, requires_grad=True)
    offload.mark_not_offloadable(marked[:2])  # by storage
    with offload.group("g"):
        y = (x @ model.weight.t()) @ (x * model.table) @ marked
    moved = offload.summary().groups["g"]
    assert moved.saved_bytes == 4 * 64 * 64 * 4  # x, x @ w, x * table, their product; not w, table, marked
    y.sum().backward()
    offload.close()


def test_one_tensor_and_one_storage_saved_often_are_stored_once():
    x = torch.randn(64, 96, requires_grad=True)
    offload = ActivationOffload(nn.Identity(), small(max_in_flight=0))
    base = x * 1.0
    with offload.group("first"):
        a = base.exp().sum() + (base * base).sum()
    with offload.group("second"):
        b = (base[:32] * base[:32]).sum() + (base.t() * base.t()).sum()
    groups = offload.summary().groups
    assert groups["first"].offloaded_bytes == 2 * base.nbytes  # base and exp(base)
    assert groups["second"].offloaded_bytes == 0
    assert groups["second"].shared_bytes == 2 * (base.nbytes // 2) + 2 * base.nbytes
    del base
    (a + b).backward()
    y = x.detach().clone().requires_grad_()
    (y.exp().sum() + (y * y).sum() + (y[:32] * y[:32]).sum() + (y.t() * y.t()).sum()).backward()
    assert torch.allclose(x.grad, y.grad)
    assert everything_is_back(offload)
    offload.close()


@pytest.mark.parametrize(("columns", "stride", "moved"), [(80, (96, 1), 6144 * 4), (8, (8, 1), 64 * 8 * 4)])
def test_a_view_comes_back_with_its_values_and_strides(columns, stride, moved):
    offload = ActivationOffload(nn.Identity(), small(max_in_flight=0))
    x = torch.randn(64, 96, requires_grad=True)
    base = x * 1.0
    with offload.group("view"):
        y = base[:, :columns].sin()
    values = base.detach()[:, :columns].clone()
    del base
    assert offload.summary().groups["view"].offloaded_bytes == moved
    got = y.grad_fn._saved_self
    assert torch.equal(got, values)
    assert got.stride() == stride
    assert offload.summary().host["in_use_bytes"] > 0
    del y, got
    assert everything_is_back(offload)
    offload.close()


def test_an_inplace_change_after_saving_is_an_error_as_in_torch():
    for limit, numel in ((0, 1000), (None, 1000), (None, 3)):  # few bytes stay where they are
        offload = ActivationOffload(nn.Identity(), small(max_in_flight=limit))
        for changed_inside in (True, False):
            x = torch.randn(numel, requires_grad=True)
            with offload.group("g"):
                y = x * 1.0
                z = y * y
                if changed_inside:
                    y.add_(1)
            if not changed_inside:
                y.add_(1)
            with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*version 1; expected version 0"):
                z.sum().backward()
            del x, y, z
        assert everything_is_back(offload)
        offload.close()


def test_inplace_operations_that_torch_allows_give_the_same_bits():
    def run(x: torch.Tensor) -> torch.Tensor:
        return (x * 2).relu_().tanh().sum() + (x * 3).mul_(2).sigmoid_().add(1).log_().sum()

    x = torch.randn(1000, requires_grad=True)
    (want,) = torch.autograd.grad(run(x), x)
    offload = ActivationOffload(nn.Identity(), small(max_in_flight=0))
    with offload.group("g"):
        y = run(x)
    assert torch.equal(torch.autograd.grad(y, x)[0], want)
    offload.close()


def test_retain_graph_reads_twice_and_frees_between():
    model, x = transformer(), hidden()
    want = gradients(model, x)
    with ActivationOffload(model, small(max_in_flight=0), offload_modules=BLOCKS) as offload:
        model.zero_grad()
        torch.manual_seed(1)
        loss = model(x).square().mean()
        loss.backward(retain_graph=True)
        assert offload.summary().device_bytes == 0
        assert offload.summary().host["in_use_bytes"] > 0
        first = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        loss.backward()
        assert equal(first, want)
        assert equal([p.grad for p in model.parameters()], want)
        assert everything_is_back(offload)


def test_double_backward_is_bit_equal():
    def penalty(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
        model.zero_grad()
        (grad,) = torch.autograd.grad(model(x).square().mean(), x, create_graph=True)
        grad.square().sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.LayerNorm(32)) for _ in range(3)])
    x = torch.randn(64, 32, requires_grad=True)
    want = penalty(model, x)
    with ActivationOffload(model, small(), offload_modules=["?"]) as offload:
        assert all(equal(penalty(model, x), want) for _ in range(2))
        gc.collect()
        assert everything_is_back(offload)


def test_changing_shapes_eval_and_no_grad_between():
    model = transformer()
    plain = transformer()
    with ActivationOffload(model, small(fraction=0.7, margin=1), offload_modules=BLOCKS) as offload:
        for length in (16, 5, 33, 16, 2, 40):
            x = hidden(length=length)
            with torch.no_grad():
                model(x)
            model.eval()
            model(x)  # with grad, never backward
            model.train()
            assert equal(gradients(model, x), gradients(plain, x))
        assert everything_is_back(offload)


def test_a_changing_order_and_number_of_groups():
    class Shuffled(Transformer):
        order = (0, 1, 2, 3)

        def forward(self, x):
            for index in self.order:
                x = self.layers[index](x)
            return self.head(x)

    torch.manual_seed(0)
    model = Shuffled()
    x = hidden()
    with ActivationOffload(model, small(margin=1), offload_modules=BLOCKS) as offload:
        for order in [(0, 1, 2, 3), (3, 1), (2, 2, 0), (0, 1, 2, 3), (1,)]:
            model.order = order
            got = gradients(model, x)
            with offload.disabled():
                assert equal(got, gradients(model, x))
        assert everything_is_back(offload)


def test_an_exception_between_forward_and_backward_and_one_inside_a_group():
    class Fails(nn.Module):
        fail = False

        def forward(self, x):
            if self.fail:
                raise ValueError("broken")
            return x

    model = transformer()
    model.layers[2].mlp.append(Fails())
    x = hidden()
    want = gradients(model, x)
    with ActivationOffload(model, small(), offload_modules=BLOCKS) as offload:
        for fail_inside in (True, False):
            model.layers[2].mlp[-1].fail = fail_inside
            if fail_inside:
                with pytest.raises(ValueError, match="broken"):
                    model(x)
            else:
                model(x)  # the caller gives up here
            model.layers[2].mlp[-1].fail = False
            assert equal(gradients(model, x), want)
        with pytest.raises(ValueError, match="inside"), offload.group("scope"):
            raise ValueError("inside")
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
        assert everything_is_back(offload)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_activation_checkpointing_inside_and_outside(reentrant, inside):
    class Checkpointed(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=reentrant)

    model = transformer()
    x = hidden().requires_grad_()
    for layer in model.layers:
        layer.mlp = Checkpointed(layer.mlp)
    want = gradients(model, x)
    patterns = {"mlp": "layers.*.mlp" if inside else "layers.*.mlp.inner", "attn": "layers.*.attn"}
    with ActivationOffload(model, small(), offload_modules=patterns) as offload:
        assert all(equal(gradients(model, x), want) for _ in range(2))
        groups = offload.summary().groups
        assert groups["attn"].offloaded_bytes > 0
        if inside:  # what leaves is what the checkpoint itself saves: its input
            assert groups["mlp"].offloaded_bytes == 2 * 4 * x.nbytes
        else:  # the checkpoint decides over what is inside it: nothing leaves, not even while it recomputes
            assert "mlp" not in groups or groups["mlp"].offloaded_bytes == 0
        gc.collect()
        assert everything_is_back(offload)


def test_two_instances_share_nothing():
    a, b, x = transformer(), transformer(), hidden()
    want = gradients(transformer(), x)
    with (
        ActivationOffload(a, small(), offload_modules=BLOCKS) as first,
        ActivationOffload(b, small(), offload_modules=BLOCKS) as second,
    ):
        results: dict[int, list[torch.Tensor]] = {}

        def run(index: int, model: nn.Module) -> None:
            model.zero_grad()
            for layer in model.layers:
                layer.drop.p = 0.0
            model(x).square().mean().backward()
            results[index] = [p.grad for p in model.parameters()]

        threads = [threading.Thread(target=run, args=pair) for pair in enumerate((a, b))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert equal(results[0], results[1])
        assert not equal(results[0], want)  # dropout was off
        assert first.summary().offloaded_bytes == second.summary().offloaded_bytes > 0
        assert everything_is_back(first)
        assert everything_is_back(second)


def test_a_copy_of_the_model_has_no_offload():
    model, x = transformer(), hidden()
    with ActivationOffload(model, small(), offload_modules=BLOCKS) as offload:
        want = gradients(model, x)
        before = offload.summary().offloaded_bytes
        copied = pickle.loads(pickle.dumps(copy.deepcopy(model)))
        assert equal(gradients(copied, x), want)
        assert offload.summary().offloaded_bytes == before > 0


def test_release_frees_what_is_dead_and_refuses_what_is_held():
    offload = ActivationOffload(nn.Identity(), small(max_in_flight=0))
    x = torch.randn(1000, requires_grad=True)
    held = x * 2
    with offload.group("g", commit=False) as scope:
        hand_over = [x * 3, held]
        y = hand_over[0].sin() + held.sin()
    ref = StorageWeakRef(hand_over[0].untyped_storage())
    scope.commit(release=hand_over)
    assert hand_over == []
    totals = offload.summary().groups["g"]
    assert (totals.released_bytes, totals.refused_bytes) == (4000, 4000)
    assert ref.expired()
    y.sum().backward()
    assert torch.allclose(x.grad, 3 * (3 * x.detach()).cos() + 2 * (2 * x.detach()).cos())
    offload.close()


def test_delayed_groups_leave_at_the_flush_in_forward_order():
    offload = ActivationOffload(nn.Identity(), small(max_in_flight=0), delay_groups=["late"])
    x = torch.randn(1000, requires_grad=True)
    with offload.delayed():
        ys = []
        for name in ("late", "now", "late"):
            with offload.group(name):
                ys.append((x * 2).exp())
        assert set(offload.summary().groups) == {"now"}
        assert offload.flush_delayed() == 2
        assert offload.summary().groups["late"].offloaded_bytes == 2 * 4000
        with offload.group("late"):
            ys.append((x * 2).exp())
        early = ys.pop(0)
        early.sum().backward()  # also while one waits
    assert [span.label for span in offload.spans() if span.direction == "out"] == ["now", "late", "late", "late"]
    sum(ys).sum().backward()
    assert torch.equal(x.grad, 4 * (2 * (x.detach() * 2).exp()))
    offload.close()


@pytest.mark.parametrize("schedule", ["1f1b", "all then all", "one backward"])
def test_several_microbatches_in_flight_come_back_in_order(schedule):
    model, plain = transformer(dropout=0.0), transformer(dropout=0.0)
    batches = [hidden(seed=s) for s in range(5)]

    def run(net: nn.Module) -> list[torch.Tensor]:
        net.zero_grad()
        if schedule == "one backward":
            sum(net(b).square().mean() for b in batches).backward()
        else:
            ahead = 2 if schedule == "1f1b" else len(batches)
            losses = [net(b).square().mean() for b in batches[:ahead]]
            for index in range(len(batches)):
                losses.pop(0).backward()
                if index + ahead < len(batches):
                    losses.append(net(batches[index + ahead]).square().mean())
        return [p.grad.clone() for p in net.parameters()]

    want = run(plain)
    with ActivationOffload(model, small(margin=0), offload_modules=BLOCKS) as offload:
        assert all(equal(run(model), want) for _ in range(3))
        order = [key.ordinal for key in offload._order.learned]
        assert order == ([4, 3, 2, 1, 0] if schedule == "one backward" else [0, 1, 2, 3, 4])
        # Only the very first group of each step is not asked for ahead.
        totals = offload.summary().groups
        assert totals["mlp"].misses <= 3 * 5 * 1 * 6
        assert totals["attn"].misses == 0
        assert everything_is_back(offload)


def test_virtual_stages_are_chunks_of_their_own():
    model, plain = transformer(dropout=0.0), transformer(dropout=0.0)

    def stages(net: Transformer) -> list[nn.Module]:
        return [nn.Sequential(net.layers[0], net.layers[1]), nn.Sequential(net.layers[2], net.layers[3], net.head)]

    def run(parts: list[nn.Module], net: nn.Module) -> list[torch.Tensor]:
        net.zero_grad()
        lows = [parts[0](hidden(seed=s)) for s in range(2)]
        tops = [low.detach().requires_grad_() for low in lows]
        losses = [parts[1](top).square().mean() for top in tops]
        for loss in losses:
            loss.backward()
        for low, top in zip(lows, tops, strict=True):
            low.backward(top.grad)
        return [p.grad.clone() for p in net.parameters()]

    want = run(stages(plain), plain)
    parts = stages(model)
    with ActivationOffload(parts, small(), offload_modules={"mlp": "*.mlp", "attn": "*.attn"}) as offload:
        assert all(equal(run(parts, model), want) for _ in range(3))
        assert offload._order.learned == (ChunkKey(1, 0), ChunkKey(1, 1), ChunkKey(0, 0), ChunkKey(0, 1))
        assert everything_is_back(offload)


@pytest.mark.parametrize(
    ("compress", "share", "tolerance"),
    [("fp16", 0.5, 5e-3), ("bf16", 0.5, 2e-2), ("int8", 260 / 1024, 5e-2), ("quantization", 140 / 1024, 0.6)],
)
def test_compression_shrinks_host_bytes_and_is_near(compress, share, tolerance):
    model, x = transformer(), hidden()
    want = gradients(model, x)
    policy = small(compress=compress, max_in_flight=0)  # else a late copy is not made: its source is still there
    with ActivationOffload(model, policy, offload_modules=BLOCKS) as offload:
        got = gradients(model, x)
        totals = offload.summary().groups["mlp"]
        assert totals.host_bytes == pytest.approx(share * totals.offloaded_bytes, rel=0.01)
    assert not equal(got, want)
    for a, b in zip(got, want, strict=True):
        assert (a - b).norm() <= tolerance * b.norm() + 1e-6


def test_a_full_host_keeps_tensors_on_the_device():
    model, x = transformer(), hidden()
    want = gradients(model, x)
    with ActivationOffload(model, small(host_cap_bytes=100_000), offload_modules=BLOCKS) as offload:
        assert equal(gradients(model, x), want)
        assert offload.summary().host["peak_bytes"] <= 100_000
        assert sum(totals.no_room_bytes for totals in offload.summary().groups.values()) > 0
        assert everything_is_back(offload)
        assert offload.trim() > 0
        assert offload.summary().host["total_bytes"] == 0


@pytest.mark.parametrize("max_in_flight", [None, 0])
def test_a_failed_copy_keeps_its_tensor(max_in_flight):
    def fail(direction: str, label: str) -> None:
        raise OSError("no link")

    model, x = transformer(), hidden()
    want = gradients(model, x)
    policy, lane = small(max_in_flight=max_in_flight), WatchedLane(fail)
    with ActivationOffload(model, policy, offload_modules=BLOCKS, lane=lane) as offload:
        assert equal(gradients(model, x), want)
        assert everything_is_back(offload)


def test_a_failed_copy_back_is_raised_where_it_is_needed():
    def fail(direction: str, label: str) -> None:
        if direction == "in":
            raise OSError("no link")

    model, x = transformer(), hidden()
    lane = WatchedLane(fail)
    with ActivationOffload(model, small(max_in_flight=0), offload_modules=BLOCKS, lane=lane) as offload:
        with pytest.raises(RayZeroError, match="no link"):
            gradients(model, x)
        gc.collect()
        assert everything_is_back(offload)


def test_closing_between_forward_and_backward():
    model, x = transformer(), hidden()
    want = gradients(model, x)
    model.zero_grad()
    offload = ActivationOffload(model, small(max_in_flight=0), offload_modules=BLOCKS)
    torch.manual_seed(1)
    loss = model(x).square().mean()
    offload.close()
    loss.backward()
    assert equal([p.grad for p in model.parameters()], want)


def test_a_budget_is_kept_by_offload_and_recomputation_and_follows_the_model():
    model = transformer(num_layers=6)
    x = hidden(length=64)
    want = gradients(model, x)
    with ActivationOffload(model, small(fraction=0.0), offload_modules=BLOCKS) as offload:
        gradients(model, x)
        everything = offload.summary().peak_device_bytes
    budget = everything // 3
    policy = small(device_budget_bytes=budget, max_in_flight=0)  # else all passes may end before one copy
    with ActivationOffload(model, policy, offload_modules=BLOCKS) as offload:
        for _ in range(4):
            assert equal(gradients(model, x), want)
        plan = offload.plan()
        assert plan.fits
        assert plan.held_bytes <= budget
        assert len(plan.choices) == 12
        longer = hidden(length=96)
        plain = transformer(num_layers=6)
        for _ in range(3):
            assert equal(gradients(model, longer), gradients(plain, longer))
        assert offload.plan() is not plan
        assert offload.plan().held_bytes <= budget
        assert everything_is_back(offload)


def test_a_very_slow_link_makes_the_plan_recompute():
    class Slow(WatchedLane):
        """Copies of 20 ms and more beside groups of 1 ms, whatever else the machine does."""

        def __init__(self) -> None:
            never = threading.Event()
            super().__init__(lambda direction, label: never.wait(0.02) and None)

        def seconds(self, start: object, stop: object) -> float:
            return 1e-3

    model, x = transformer(num_layers=3), hidden(length=64)
    want = gradients(model, x)
    policy = small(device_budget_bytes=600_000, max_in_flight=0)  # else three passes may end before one copy
    with ActivationOffload(model, policy, offload_modules={"block": "layers.?"}, lane=Slow()) as offload:
        for _ in range(3):
            assert equal(gradients(model, x), want)
        assert "recompute" in {choice.value for choice in offload.plan().choices}
        assert offload.summary().groups["block"].recomputed > 0
        assert all("forward" not in layer.__dict__ for layer in model.layers)
        assert everything_is_back(offload)


@pytest.mark.promise("observable", "activations")
def test_the_summary_is_a_table_and_json(capsys):
    import json

    from rich.console import Console

    model, x = transformer(), hidden()
    recorder = MemoryRecorder()
    with ActivationOffload(model, small(rank=3), offload_modules=BLOCKS, recorder=recorder) as offload:
        gradients(model, x)
        found = ledger.gather(offload.summary())
    assert recorder.total(ACTIVATION_BYTES, direction="out") == found[0].offloaded_bytes
    Console(width=120).print(ledger.table([*found, *found]))
    shown = capsys.readouterr().out
    assert "attn" in shown
    assert f"{2 * found[0].offloaded_bytes / 2**20:.2f}" in shown
    assert json.loads(ledger.to_json(found))[0]["groups"]["mlp"]["offloaded_bytes"] > 0


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # loading the compiler
def test_a_match_inside_what_torch_compile_made_is_refused():
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4))
    model[0] = torch.compile(model[0])
    inside = r"'0\*' matches '0._orig_mod', which is inside a module that torch.compile\(\) made"
    with pytest.raises(UnsupportedError, match=inside):
        match_modules([model], ["0*"])
    assert [full for _, full, _ in match_modules([model], ["?"])] == ["0", "1"]
    with pytest.raises(UnsupportedError, match=r"'_orig_mod\.1'"):
        match_modules([torch.compile(model)], ["_orig_mod.1"])
    stages = [torch.compile(nn.Sequential(nn.Linear(4, 4))), nn.Sequential(nn.Linear(4, 4))]
    assert [module for _, _, module in match_modules(stages, ["0"])] == [stages[1][0]], "another stage is compiled"


def test_a_pattern_without_match_and_no_model_are_refused():
    with pytest.raises(ConfigError, match=r"'layers.\*.mpl' matches no submodule of Transformer"):
        ActivationOffload(transformer(), offload_modules=["layers.*.mpl"])
    with pytest.raises(ConfigError, match="needs a model"):
        ActivationOffload([])
