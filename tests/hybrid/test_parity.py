"""Bit-equal to the plain optimizer, for any fraction, overlap setting and order of arrival."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from rayzero import HybridDeviceOptimizer
from rayzero.errors import UnsupportedError
from tests.hybrid.models import backward, convnet, equal, net, states_equal, train, weights

SMALL = 4096  # bytes of a bucket: several of them even here
ADAMW = {"lr": 1e-2, "weight_decay": 0.1}


def plain(model: nn.Module, cls=torch.optim.AdamW, **options) -> torch.optim.Optimizer:
    fused = {"fused": True} if cls in (torch.optim.Adam, torch.optim.AdamW) else {}
    return cls(model.parameters(), **fused, **options)


@pytest.mark.promise("exact", "hybrid")
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("in_backward", ["nothing", "send", "step"])
@pytest.mark.parametrize("fraction", [0.0, 0.3, 0.77, 1.0])
def test_adamw_is_bit_equal_to_torchs(fraction, in_backward, overlap):
    model, twin = net(), net()
    want = train(twin, reference := plain(twin, **ADAMW))
    hybrid = HybridDeviceOptimizer(
        model.parameters(),
        fraction,
        overlap_cpu_optimizer_d2h_h2d=overlap,
        in_backward=in_backward,
        bucket_bytes=SMALL,
        **ADAMW,
    )
    assert equal(train(model, hybrid), want)
    assert states_equal(hybrid, reference)
    assert hybrid.placement().offload_fraction == pytest.approx(fraction, abs=64 * 4 / 15000)
    hybrid.close()


@pytest.mark.parametrize("kernel", ["native", "torch"])
@pytest.mark.parametrize("options", [{"amsgrad": True}, {"maximize": True}, {"betas": (0.4, 0.9)}])
@pytest.mark.parametrize("cls", [torch.optim.Adam, torch.optim.AdamW])
def test_both_adams_and_their_options(cls, options, kernel):
    model, twin = net(), net()
    want = train(twin, reference := plain(twin, cls, **ADAMW, **options))
    hybrid = HybridDeviceOptimizer(model.parameters(), 0.6, cls, bucket_bytes=SMALL, kernel=kernel, **ADAMW, **options)
    assert equal(train(model, hybrid), want)
    assert states_equal(hybrid, reference)


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (torch.optim.SGD, {"lr": 0.1}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
        (torch.optim.Adagrad, {"lr": 0.1}),
        (torch.optim.RMSprop, {"lr": 0.01, "centered": True}),
        (torch.optim.NAdam, {}),
        (torch.optim.Adafactor, {"lr": 0.01}),  # not element-wise: parameters stay whole
    ],
)
def test_other_classes_run_as_they_are(cls, options):
    model, twin = net(), net()
    want = train(twin, reference := plain(twin, cls, **options))
    hybrid = HybridDeviceOptimizer(model.parameters(), 0.6, cls, bucket_bytes=SMALL, **options)
    assert equal(train(model, hybrid), want)
    assert states_equal(hybrid, reference)
    cut = [piece for run in hybrid._runs for piece in run.bucket.pieces if not piece.whole]
    assert bool(cut) is (cls is not torch.optim.Adafactor)


def test_two_classes_share_the_options_that_both_have():
    model = net()
    hybrid = HybridDeviceOptimizer(
        model.parameters(),
        0.5,
        torch.optim.SGD,
        torch.optim.AdamW,
        lr=1e-2,
        weight_decay=0.0,
        momentum=0.9,
        maximize=False,
    )
    train(model, hybrid, 2)
    states = list(hybrid.state.values())
    assert "momentum_buffer" in states[0]
    assert "exp_avg" in states[-1]


@pytest.mark.parametrize("fraction", [0.0, 0.4, 1.0])
def test_bf16_without_masters_is_torchs_bf16_update(fraction):
    model, twin = net(torch.bfloat16), net(torch.bfloat16)
    want = train(twin, reference := plain(twin, **ADAMW))
    hybrid = HybridDeviceOptimizer(model.parameters(), fraction, bucket_bytes=SMALL, **ADAMW)
    assert equal(train(model, hybrid), want)
    assert states_equal(hybrid, reference)


def train_with_masters(model: nn.Module, steps: int, clip: float | None = None) -> list[nn.Parameter]:
    """The plain loop around fp32 masters of a 16-bit model."""
    masters = [nn.Parameter(param.detach().float()) for param in model.parameters()]
    optimizer = torch.optim.AdamW(masters, fused=True, **ADAMW)
    for step in range(steps):
        model.zero_grad()
        backward(model, step)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        for master, param in zip(masters, model.parameters(), strict=True):
            master.grad = param.grad.float()
        optimizer.step()
        with torch.no_grad():
            for master, param in zip(masters, model.parameters(), strict=True):
                param.copy_(master)
    return masters


@pytest.mark.parametrize("clip", [None, 1e-3])
@pytest.mark.parametrize("fraction", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_parameters_are_updated_through_fp32_masters(dtype, fraction, clip):
    model, twin = net(dtype), net(dtype)
    masters = train_with_masters(twin, 4, clip)
    hybrid = HybridDeviceOptimizer(model.parameters(), fraction, param_update_in_fp32=True, bucket_bytes=SMALL, **ADAMW)
    clipped = (lambda: hybrid.clip_grad_norm_(clip)) if clip else lambda: None
    assert equal(train(model, hybrid, between=clipped), weights(twin))
    found = [hybrid.state[param]["master_param"] for param in model.parameters()]
    assert equal(found, [master.detach() for master in masters])
    assert all(run.bucket.grads.dtype is dtype for run in hybrid._runs)  # 16 bits travel
    assert all(run.bucket.params.dtype is dtype for run in hybrid._runs)


# ---- gradients --------------------------------------------------------------------------------------------------


def test_a_gradient_that_is_gone_is_not_stepped_with_again():
    model, twin = net(), net()
    hybrid = HybridDeviceOptimizer(model.parameters(), 1.0, bucket_bytes=SMALL, **ADAMW)
    reference = plain(twin, **ADAMW)
    for step in range(4):
        for each, optimizer in ((model, hybrid), (twin, reference)):
            optimizer.zero_grad()
            backward(each, step)
            if step % 2:
                each[2].weight.grad = None
                each[0].bias.grad = None
            optimizer.step()
    assert equal(weights(model), weights(twin))
    assert states_equal(hybrid, reference)
    assert hybrid.state[model[2].weight]["step"] == 2


def test_a_step_without_gradients_changes_nothing():
    model = net()
    hybrid = HybridDeviceOptimizer(model.parameters(), 0.5, **ADAMW)
    before = weights(model)
    hybrid.step()
    assert equal(weights(model), before)
    assert not hybrid.state


@pytest.mark.parametrize(
    "change", ["accumulate", "torch clip", "multiply", "replace", "clip", "clip twice", "clip then multiply"]
)
def test_gradients_that_change_after_they_left_count_as_they_are(change):
    def changed(model: nn.Module, optimizer) -> None:
        params = list(model.parameters())
        if change == "accumulate":
            backward(model, 99)
        elif change == "torch clip":
            nn.utils.clip_grad_norm_(params, 1e-2)
        elif change == "replace":
            params[0].grad = params[0].grad * 0.5
        elif change == "multiply":
            with torch.no_grad():
                params[0].grad.mul_(0.5)
        for _ in range({"clip": 1, "clip twice": 2, "clip then multiply": 1}.get(change, 0)):
            own = isinstance(optimizer, HybridDeviceOptimizer)
            optimizer.clip_grad_norm_(3e-3) if own else nn.utils.clip_grad_norm_(params, 3e-3)
        if change == "clip then multiply":
            with torch.no_grad():
                params[2].grad.mul_(0.3)

    model, twin = net(), net()
    hybrid = HybridDeviceOptimizer(model.parameters(), 0.7, bucket_bytes=SMALL, **ADAMW)
    reference = plain(twin, **ADAMW)
    want = train(twin, reference, between=lambda: changed(twin, reference))
    assert equal(train(model, hybrid, between=lambda: changed(model, hybrid)), want)
    assert equal([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])


def test_clipping_returns_torchs_norm_and_sends_nothing_again():
    model, twin = net(), net()
    hybrid = HybridDeviceOptimizer(model.parameters(), 1.0, bucket_bytes=SMALL, **ADAMW)
    backward(model, 0), backward(twin, 0)
    norm = hybrid.clip_grad_norm_(1e-3)
    assert torch.equal(norm, nn.utils.clip_grad_norm_(twin.parameters(), 1e-3))
    assert all(not hybrid._sides.host.stale(run)[1] for run in hybrid._runs)


def test_gradients_leave_once_the_last_expected_backward_is_over():
    model = net()
    hybrid = HybridDeviceOptimizer(model.parameters(), 1.0, **ADAMW)
    sent = []
    for step in range(3):
        for part in range(3):
            backward(model, 3 * step + part)
            sent.append(bool(hybrid._runs[0].sent))
        hybrid.step()
        hybrid.zero_grad()
    assert sent == [True, True, True] + 2 * [False, False, True]  # the first step shows how many there are


@pytest.mark.parametrize("inf_at", [None, 1])
@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("fraction", [0.4, 1.0])
def test_grad_scaler(fraction, unscale, inf_at):
    def run(model: nn.Module, optimizer) -> float:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
        for step in range(5):
            optimizer.zero_grad()
            backward(model, step, scale=scaler.scale(torch.ones(())).item())
            if step == inf_at:
                next(model.parameters()).grad[0, 0] = float("inf")
            if unscale:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
            scaler.step(optimizer)
            scaler.update()
        return scaler.get_scale()

    model, twin = net(), net()
    hybrid = HybridDeviceOptimizer(model.parameters(), fraction, bucket_bytes=SMALL, **ADAMW)
    reference = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    assert run(model, hybrid) == run(twin, plain(twin, **ADAMW))
    other, sgd = net(), net()
    hybrid = HybridDeviceOptimizer(other.parameters(), fraction, torch.optim.SGD, lr=0.1, momentum=0.9)
    reference = torch.optim.SGD(sgd.parameters(), lr=0.1, momentum=0.9)
    assert run(other, hybrid) == run(sgd, reference)
    assert equal(weights(other), weights(sgd))
    assert states_equal(hybrid, reference)


def test_decoupled_grad_comes_before_grad():
    model, twin = net(), net()
    hybrid = HybridDeviceOptimizer(model.parameters(), 0.5, bucket_bytes=SMALL, **ADAMW)

    def move() -> None:
        for param in model.parameters():
            param.decoupled_grad, param.grad = param.grad, torch.full_like(param, 7.0)

    assert equal(train(model, hybrid, between=move), train(twin, plain(twin, **ADAMW)))
    hybrid.zero_grad()
    assert all(param.decoupled_grad is None and param.grad is None for param in model.parameters())


def test_parameters_that_are_not_contiguous_stay_whole():
    model, twin = (convnet().to(memory_format=torch.channels_last) for _ in range(2))
    hybrid = HybridDeviceOptimizer(model.parameters(), 0.35, torch.optim.SGD, lr=0.1, momentum=0.9)
    want = train(twin, plain(twin, torch.optim.SGD, lr=0.1, momentum=0.9))
    assert equal(train(model, hybrid), want)
    assert model[2].weight.is_contiguous(memory_format=torch.channels_last)


def test_frozen_parameters_live_nowhere_until_they_are_unfrozen():
    model, twin = net(), net()
    pair = []
    for each, make in ((model, lambda p: HybridDeviceOptimizer(p, 0.5, **ADAMW)), (twin, None)):
        each[0].requires_grad_(False)
        optimizer = make(each.parameters()) if make else plain(each, **ADAMW)
        train(each, optimizer, 2)
        each[0].requires_grad_(True)
        train(each, optimizer, 2, first=2)
        pair.append(optimizer)
    assert equal(weights(model), weights(twin))
    assert states_equal(*pair)


def test_the_closure_is_called_once_and_its_loss_returned():
    model = net()
    hybrid = HybridDeviceOptimizer(model.parameters(), 0.5, **ADAMW)
    calls = []

    def closure():
        calls.append(torch.is_grad_enabled())
        hybrid.zero_grad()
        return backward(model, 0)

    loss = hybrid.step(closure)
    assert calls == [True]
    assert loss.item() > 0
    assert hybrid.state


@settings(max_examples=min(settings.default.max_examples, 25))
@given(
    shapes=st.lists(st.lists(st.integers(1, 40), max_size=3), min_size=1, max_size=5),
    fraction=st.floats(0, 1),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    order=st.sampled_from(["first", "last"]),
    bucket_bytes=st.sampled_from([256, 1000, 16 << 20]),
    fp32=st.booleans(),
)
def test_any_shapes_fraction_dtype_and_buckets(shapes, fraction, dtype, order, bucket_bytes, fp32):
    draws = torch.Generator().manual_seed(1)
    start = [torch.randn(shape, generator=draws).to(dtype) for shape in shapes]
    ours, theirs = ([nn.Parameter(value.clone()) for value in start] for _ in range(2))
    hybrid = HybridDeviceOptimizer(
        ours, fraction, offload_order=order, bucket_bytes=bucket_bytes, param_update_in_fp32=fp32, **ADAMW
    )
    apart = fp32 and dtype is not torch.float32
    stepped = [nn.Parameter(param.detach().float()) for param in theirs] if apart else theirs
    reference = torch.optim.AdamW(stepped, fused=True, **ADAMW)
    for _ in range(3):
        for our, their in zip(ours, stepped, strict=True):
            grad = torch.randn(our.shape, generator=draws).to(dtype)
            our.grad, their.grad = grad, grad.to(their.dtype)
        hybrid.step()
        reference.step()
    assert equal([our.detach() for our in ours], [their.detach().to(dtype) for their in stepped])
    hybrid.close()


# ---- options ----------------------------------------------------------------------------------------------------


def test_schedulers_act_at_the_next_step_on_both_sides():
    model, twin = net(), net()
    hybrid, reference = HybridDeviceOptimizer(model.parameters(), 0.5, **ADAMW), plain(twin, **ADAMW)
    for optimizer, each in ((hybrid, model), (reference, twin)):
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=8)  # betas too
        for step in range(6):
            train(each, optimizer, 1, first=step)
            scheduler.step()
    assert equal(weights(model), weights(twin))


def test_an_option_changed_in_a_sub_optimizer_is_taken_over():
    model, twin = net(), net()
    hybrid, reference = HybridDeviceOptimizer(model.parameters(), 0.5, **ADAMW), plain(twin, **ADAMW)
    train(model, hybrid, 2), train(twin, reference, 2)
    hybrid.sub_optimizers[0].param_groups[0]["lr"] = 0.3
    reference.param_groups[0]["lr"] = 0.3
    assert equal(train(model, hybrid, 2, first=2), train(twin, reference, 2, first=2))
    assert [group["lr"] for sub in hybrid.sub_optimizers for group in sub.param_groups] == [0.3, 0.3]
    hybrid.sub_optimizers[-1].param_groups[0]["weight_decay"] = 0.25
    train(model, hybrid, 1)
    assert hybrid.param_groups[0]["weight_decay"] == 0.25


# ---- updates in backward ----------------------------------------------------------------------------------------


def early(model: nn.Module) -> HybridDeviceOptimizer:
    return HybridDeviceOptimizer(model.parameters(), 0.5, in_backward="step", **ADAMW)


def scaled_step(optimizer: HybridDeviceOptimizer) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.zeros(()))
    scaler.step(optimizer)


@pytest.mark.parametrize(
    ("act", "what"),
    [
        (lambda m, o: backward(m, 1), "a second backward"),
        (lambda m, o: o.clip_grad_norm_(1.0), r"clip_grad_norm_\(\)"),
        (lambda m, o: o.zero_grad(), r"zero_grad\(\)"),
        (lambda m, o: o.state_dict(), "reading the state"),
        (lambda m, o: o.param_groups[0].update(lr=0.5) or o.step(), "changing lr"),
        (lambda m, o: m[0].weight.grad.mul_(2) is None or o.step(), "changing gradients"),
        (lambda m, o: nn.init.zeros_(m[0].weight) is None or o.step(), "writing to a parameter"),
        (lambda m, o: scaled_step(o), "GradScaler"),
    ],
)
def test_what_cannot_be_taken_back_is_refused(act, what):
    model = net()
    hybrid = early(model)
    backward(model, 0)
    with pytest.raises(UnsupportedError, match=what):
        act(model, hybrid)


def test_early_buckets_are_updated_before_step_and_parameters_change_in_it():
    model = net()
    hybrid = early(model)
    before = weights(model)
    backward(model, 0)
    assert all(run.update is not None for run in hybrid._runs)
    assert equal(weights(model), before)
    hybrid.step()
    assert not equal(weights(model), before)
