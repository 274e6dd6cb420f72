"""The same on a CUDA device; skipped without one."""

from __future__ import annotations

import pytest
import torch

from rayzero.activations import ActivationOffload, OffloadPolicy
from tests.activations.models import Exps, equal, gradients, transformer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

BLOCKS = {"attn": "layers.*.attn", "mlp": "layers.*.mlp"}


@pytest.mark.parametrize("limit", [None, 0, 1])
@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_gradients_are_bit_equal_on_cuda(limit, fraction):
    model = transformer(dim=256).cuda()
    x = torch.randn(8, 256, 256, device="cuda")
    want = gradients(model, x)
    policy = OffloadPolicy(min_bytes=1024, margin=0, fraction=fraction, max_in_flight=limit, poison=True)
    with ActivationOffload(model, policy, offload_modules=BLOCKS) as offload:
        assert all(equal(gradients(model, x), want) for _ in range(20))
        torch.cuda.synchronize()
        found = offload.summary()
        assert found.offloaded_bytes > 0
        assert (found.device_bytes, found.host["in_use_bytes"]) == (0, 0)
        assert found.host["pinned_bytes"] == found.host["total_bytes"]


def test_allocated_memory_falls_by_what_left():
    count, numel = 16, 1 << 22
    nbytes = 4 * numel
    model = Exps(count)
    x = torch.randn(numel, device="cuda", requires_grad=True)

    def peak() -> int:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model(x).sum().backward()
        x.grad = None
        return torch.cuda.max_memory_allocated() - before

    peak()
    plain = peak()
    policy = OffloadPolicy(min_bytes=1, margin=0, max_in_flight=0)
    from rayzero.activations import CudaLane

    with ActivationOffload(model, policy, offload_modules=["steps.*"], lane=CudaLane("cuda")):
        peak()
        offloaded = peak()
    # Held at once: one leaving or two returning, and the forward's or the backward's own two temporaries.
    assert plain - offloaded >= (count - 4) * nbytes


def test_copies_are_timed_by_the_device():
    model = transformer(dim=256).cuda()
    x = torch.randn(8, 256, 256, device="cuda")
    with ActivationOffload(model, OffloadPolicy(min_bytes=1024, margin=0), offload_modules=BLOCKS) as offload:
        gradients(model, x)
        torch.cuda.synchronize()
        spans = offload.spans()
    assert {span.direction for span in spans} == {"out", "in"}
    assert all(span.stop > span.start for span in spans)


@pytest.mark.parametrize("limit", [0, 1])
def test_a_forward_and_its_backward_captured_into_two_graphs(limit: int) -> None:
    model = transformer(dim=256).cuda()
    for layer in model.layers:
        layer.drop.p = 0.0
    x = torch.randn(8, 256, 256, device="cuda")
    want = gradients(model, x)
    policy = OffloadPolicy(min_bytes=1024, margin=0, max_in_flight=limit)
    forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with ActivationOffload(model, policy, offload_modules=BLOCKS) as offload:
        marks = offload.graph_marks
        with torch.cuda.stream(marks.stream):
            for _ in range(3):  # libraries start outside of captures
                gradients(model, x)
            offload.prepare_capture()
        model.zero_grad()
        with torch.cuda.graph(forward, stream=marks.stream):
            loss = model(marks.backward_record(x.clone().requires_grad_())).square().mean()
            marks.forward_record()
        with torch.cuda.graph(backward, pool=forward.pool(), stream=marks.stream):
            loss.backward()
        for _ in range(5):
            for parameter in model.parameters():
                parameter.grad.zero_()
            forward.replay()
            backward.replay()
            torch.cuda.synchronize()
            assert equal([p.grad for p in model.parameters()], want)
        assert offload.summary().offloaded_bytes > 0
    del forward, backward
