"""Measures activation offload against none and against torch's save_on_cpu, on the same model: see lab/README.md.

python -m lab activations [--layers 12] [--width 1024] [--tokens 4096] [--rounds 9] [--json]

The three ways take turns within a round, so that a busy machine disturbs all of them; seconds are medians over the
rounds. Memory is the allocator's peak beyond the model and its gradients on CUDA; elsewhere it is not measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu

from rayzero.activations import ActivationOffload, OffloadPolicy

HEAD_WIDTH = 64


def build(layers: int, width: int, device: torch.device) -> nn.Module:
    """A transformer encoder without dropout: bf16 on CUDA, fp32 on the CPU."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        width, max(1, width // HEAD_WIDTH), 4 * width, dropout=0.0, batch_first=True, norm_first=True
    )
    model = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    return model.to(device, torch.bfloat16 if device.type == "cuda" else torch.float32)


def step(model: nn.Module, x: Tensor) -> None:
    """Run forward and backward. ``x``: (batch, sequence, width)."""
    model(x).square().mean().backward()


def measure(run: Callable[[], None], device: torch.device) -> tuple[float, int]:
    """(seconds of ``run``, its peak bytes beyond what was allocated before it, 0 without CUDA)."""
    on_cuda = device.type == "cuda"
    if on_cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if on_cuda else 0
    started = time.perf_counter()
    run()
    if on_cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    return seconds, torch.cuda.max_memory_allocated() - before if on_cuda else 0


def compare(layers: int, width: int, tokens: int, rounds: int) -> dict[str, object]:
    """Measure all ways; returns the device, the settings, and the median seconds and peak bytes of a step by way."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    models = {way: build(layers, width, device) for way in ("none", "rayzero", "save_on_cpu")}
    x = torch.randn(4, tokens // 4, width, device=device, dtype=next(models["none"].parameters()).dtype)
    found: dict[str, list[tuple[float, int]]] = {way: [] for way in models}
    names = [f"layers.{i}" for i in range(layers)]
    with ActivationOffload(models["rayzero"], OffloadPolicy(), offload_modules=names):
        for _ in range(rounds + 2):  # the first two warm up
            for way, model in models.items():
                torch_way = way == "save_on_cpu"
                around: AbstractContextManager[object] = (
                    save_on_cpu(pin_memory=device.type == "cuda") if torch_way else nullcontext()
                )
                with around:
                    found[way].append(measure(lambda model=model: step(model, x), device))
    _require_same(models)
    return {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "settings": {"layers": layers, "width": width, "tokens": tokens, "rounds": rounds},
        "ways": {
            way: {
                "step_seconds": statistics.median(seconds for seconds, _ in figures[2:]),
                "peak_bytes": max(size for _, size in figures[2:]),
            }
            for way, figures in found.items()
        },
    }


def _require_same(models: dict[str, nn.Module]) -> None:
    """Exit with an error unless all ways made the same gradients, bit for bit."""
    for way, model in models.items():
        for ours, theirs in zip(model.parameters(), models["none"].parameters(), strict=True):
            if ours.grad is None or theirs.grad is None or not torch.equal(ours.grad, theirs.grad):
                raise SystemExit(f"gradients of {way} differ from those without offload")


def main() -> None:
    """Run the command: print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("layers", 12), ("width", 1024), ("tokens", 4096), ("rounds", 9)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    result = compare(options.layers, options.width, options.tokens, options.rounds)
    if options.json:
        print(json.dumps(result))
        return
    print(f"{result['device']}, {result['settings']}")
    ways = result["ways"]
    assert isinstance(ways, dict)
    for way, figures in ways.items():
        print(f"{way:12s} {figures['step_seconds']:.3f} s a step, {figures['peak_bytes'] / 2**20:.0f} MiB at most")
