"""Measures HybridDeviceOptimizer against one CPU optimizer per tensor with copies inside step(): see lab/README.md.

python -m lab hybrid [--layers 500] [--width 64] [--threads 1] [--rounds 9] [--device cuda] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rayzero import HybridDeviceOptimizer

ADAMW = {"lr": 1e-4, "weight_decay": 0.1}


class OneOptimizerATensor:
    """The scheme of Megatron-LM's hybrid optimizer with overlap on: each parameter has a host copy, a host gradient and
    its own AdamW. step() copies options and gradients, then steps and copies back parameter by parameter, and then
    collects the states. On a CPU, the calling thread does the work of the streams."""

    def __init__(self, params: list[Tensor]) -> None:
        self.params = params
        self.param_groups = [{"params": params, **ADAMW}]
        self.on_cuda = params[0].is_cuda
        self.copies = [nn.Parameter(_host(param.detach(), self.on_cuda).copy_(param.detach())) for param in params]
        self.grads = [_host(copy, self.on_cuda) for copy in self.copies]
        self.optimizers = [torch.optim.AdamW([copy], fused=True, **ADAMW) for copy in self.copies]
        self.state: dict[Tensor, Any] = {}

    @torch.no_grad()
    def step(self) -> None:
        options = {key: value for key, value in self.param_groups[0].items() if key != "params"}
        for optimizer in self.optimizers:
            optimizer.param_groups[0].update(options)
        for param, copy, grad in zip(self.params, self.copies, self.grads, strict=True):
            grad.copy_(param.grad, non_blocking=True)
            copy.grad = grad
        if self.on_cuda:
            torch.cuda.current_stream().synchronize()
        for param, copy, optimizer in zip(self.params, self.copies, self.optimizers, strict=True):
            optimizer.step()
            param.copy_(copy, non_blocking=True)
        self.state = {
            param: optimizer.state[copy]
            for param, copy, optimizer in zip(self.params, self.copies, self.optimizers, strict=True)
        }

    def wait(self) -> None:
        """Do nothing: no copy is in flight after step()."""

    def zero_grad(self) -> None:
        for param in self.params:
            param.grad = None


def _host(like: Tensor, pinned: bool) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=pinned)


class NoOffload(torch.optim.AdamW):
    """torch's fused AdamW on the parameters themselves, without copies or masters."""

    def __init__(self, params: list[Tensor]) -> None:
        super().__init__(params, fused=True, **ADAMW)

    def wait(self) -> None:
        """Do nothing: no copy is in flight after step()."""


CONTESTANTS: dict[str, Callable[[list[Tensor]], Any]] = {
    "one optimizer a tensor": OneOptimizerATensor,
    "hybrid": lambda params: HybridDeviceOptimizer(params, 1.0, **ADAMW),
    "hybrid, no overlap": lambda params: HybridDeviceOptimizer(
        params, 1.0, overlap_cpu_optimizer_d2h_h2d=False, **ADAMW
    ),
    "no offload": NoOffload,
}


class Player:
    """A contestant and its model."""

    def __init__(self, name: str, layers: int, width: int, device: str) -> None:
        torch.manual_seed(0)
        linears = [nn.Linear(width, width) for _ in range(layers)]
        self.model = nn.Sequential(*[part for linear in linears for part in (linear, nn.Tanh())]).to(device)
        self.optimizer = CONTESTANTS[name](list(self.model.parameters()))
        self.x = torch.randn(16, width).to(device)
        self.settle = torch.cuda.synchronize if device == "cuda" else lambda: None

    def whole(self) -> float:
        """Seconds of forward, backward and step. As in a loop, the host may still be working when they end; the device
        may not."""
        self.settle()
        begin = time.perf_counter()
        self.optimizer.zero_grad()
        self.model(self.x).square().mean().backward()
        self.optimizer.step()
        self.settle()
        return time.perf_counter() - begin

    def alone(self) -> float:
        """Seconds of a step, from ready gradients until every parameter is back."""
        self.optimizer.wait()
        self.settle()
        begin = time.perf_counter()
        self.optimizer.step()
        self.optimizer.wait()
        self.settle()
        return time.perf_counter() - begin

    def weights(self) -> list[Tensor]:
        self.optimizer.wait()
        return [param.detach().clone() for param in self.model.parameters()]


def measure(layers: int, width: int, rounds: int, repeats: int, device: str) -> dict[str, Any]:
    """Let all contestants play in turn, round by round; returns the figures, and whether their weights have equal
    bits."""
    players = {name: Player(name, layers, width, device) for name in CONTESTANTS}
    for player in players.values():
        player.whole(), player.whole()
    times: dict[str, dict[str, list[float]]] = {name: {"alone": [], "whole": []} for name in players}
    busy = []
    for _ in range(rounds):
        before, begin = os.times(), time.perf_counter()
        others = _cpu_seconds() - before.user - before.system
        for name, player in players.items():
            times[name]["alone"].append(min(player.alone() for _ in range(repeats)))
            times[name]["whole"].append(min(player.whole() for _ in range(repeats)))
        after = os.times()
        spent = time.perf_counter() - begin
        busy.append((_cpu_seconds() - after.user - after.system - others) / spent / (os.cpu_count() or 1))
    first, *rest = (player.weights() for player in players.values())
    equal = all(torch.equal(a, b) for other in rest for a, b in zip(first, other, strict=True))
    return {
        "tensors": 2 * layers,
        "parameters": sum(p.numel() for p in players["hybrid"].model.parameters()),
        "threads": torch.get_num_threads(),
        "others_took": statistics.median(busy),
        "equal_bits": equal,
        "milliseconds": {
            name: {what: 1e3 * statistics.median(found) for what, found in kinds.items()}
            for name, kinds in times.items()
        },
        "times_faster_than_one_optimizer_a_tensor": {
            name: {what: _ratio(times["one optimizer a tensor"][what], found) for what, found in kinds.items()}
            for name, kinds in times.items()
        },
    }


def _ratio(theirs: list[float], ours: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(theirs, ours, strict=True))


def _cpu_seconds() -> float:
    """Seconds that all processors of this machine have worked since it started (Linux)."""
    with open("/proc/stat") as stat:
        user, nice, system = map(int, stat.readline().split()[1:4])
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Run the command: print a table, or everything as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=500, help="two tensors each")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1, help="torch threads; several wait for each other under load")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--repeats", type=int, default=3, help="repeats of each in a round; the best counts")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    found = measure(options.layers, options.width, options.rounds, options.repeats, options.device)
    if options.json:
        print(json.dumps(found, indent=2))
        return
    print(f"{found['tensors']} tensors, {found['parameters']:,} parameters, {found['threads']} threads; ", end="")
    print(f"others took {found['others_took']:.0%} of the machine; equal bits: {found['equal_bits']}")
    print(f"{'':24}{'step alone':>14}{'faster':>8}{'whole step':>14}{'faster':>8}")
    for name, kinds in found["milliseconds"].items():
        faster = found["times_faster_than_one_optimizer_a_tensor"][name]
        row = "".join(f"{kinds[what]:11.1f} ms{faster[what]:7.2f}x" for what in ("alone", "whole"))
        print(f"{name:24}{row}")
