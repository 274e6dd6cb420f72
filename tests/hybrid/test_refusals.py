"""What cannot be right is refused by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rayzero import HybridDeviceOptimizer
from rayzero.errors import ConfigError, UnsupportedError
from tests.hybrid.models import backward, net


@pytest.mark.promise("refused", "hybrid")
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"offload_fraction": 1.5}, ConfigError, r"offload_fraction must be in \[0, 1\], got 1.5"),
        ({"offload_fraction": "auto"}, ConfigError, "\"measured\", got 'auto'"),
        ({"device_memory_budget": -1}, ConfigError, "device_memory_budget must be >= 0 bytes, got -1"),
        ({"in_backward": "now"}, ConfigError, "in_backward must be .* got 'now'"),
        ({"offload_order": "random"}, ConfigError, "offload_order must be .* got 'random'"),
        ({"bucket_bytes": 8}, ConfigError, "bucket_bytes must be >= 256, got 8"),
        ({"kernel": "magic"}, ConfigError, "kernel is 'magic'"),
        ({"momentum": 0.9}, TypeError, "AdamW and? .*no option momentum"),
        ({"differentiable": True}, UnsupportedError, "differentiable=True"),
        ({"cpu_optimizer_cls": torch.optim.LBFGS}, UnsupportedError, "LBFGS cannot be offloaded: a trial step"),
        ({"cpu_optimizer_cls": torch.optim.SparseAdam}, UnsupportedError, "SparseAdam cannot be offloaded"),
        (
            {"cpu_optimizer_cls": torch.optim.SGD, "gpu_optimizer_cls": torch.optim.AdamW},
            ConfigError,
            "SGD and AdamW have different defaults for weight_decay; pass a value for each",
        ),
    ],
)
def test_settings(options, error, message):
    with pytest.raises(error, match=message):
        HybridDeviceOptimizer(net().parameters(), **options)


@pytest.mark.parametrize(
    "param",
    [
        nn.Parameter(torch.ones(3, dtype=torch.complex64)),
        nn.Parameter(torch.ones(3, 3).to_sparse()),
        nn.parameter.UninitializedParameter(),
    ],
)
def test_parameters_without_flat_real_elements(param):
    with pytest.raises(UnsupportedError, match=r"parameter 1 is a .* only plain, dense, real"):
        HybridDeviceOptimizer([nn.Parameter(torch.ones(3)), param])


def test_sparse_gradients():
    model = nn.Embedding(10, 4, sparse=True)
    hybrid = HybridDeviceOptimizer(model.parameters(), 1.0, in_backward="nothing")
    model(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(UnsupportedError, match=r"shape \(10, 4\) is torch.sparse_coo.* use sparse=False"):
        hybrid.step()


def test_a_model_that_is_converted_later():
    model = net()
    hybrid = HybridDeviceOptimizer(model.parameters(), 0.5)
    model.to(torch.bfloat16)
    backward(model, 0)
    with pytest.raises(UnsupportedError, match=r"parameter 0 was torch.float32 on cpu and is now torch.bfloat16"):
        hybrid.step()


class Reads(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for param, name in zip(group["params"], group.get("param_names", [""] * 99), strict=False):
                if param.grad is not None and "bias" not in name:
                    param.data.sub_(param.grad * group["lr"] * getattr(param, "rate", 1.0))


def test_a_class_that_reads_attributes_or_names_that_parameters_have():
    model = net()
    HybridDeviceOptimizer(model.parameters(), 0.5, Reads)
    with pytest.raises(UnsupportedError, match="Reads cannot be offloaded: it reads 'param_names' of its groups"):
        HybridDeviceOptimizer(model.named_parameters(), 0.5, Reads)
    next(model.parameters()).rate = 0.5
    with pytest.raises(UnsupportedError, match="Reads cannot be offloaded: it reads 'rate' of the Parameters"):
        HybridDeviceOptimizer(model.parameters(), 0.5, Reads)
