"""What crosses the link to a device does so in its own dtype: torch would convert on the host, and send twice the
bytes. The device is torch's "meta", which has shapes and no memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rayzero.kernels import AdamMemory, AdamOptions, Segment
from rayzero.kernels.rank_sum import RankSum
from rayzero.kernels.torch_kernel import TorchKernel
from tests.support.reference_kernel import plain_states

META = torch.device("meta")
LENGTH = 256


class Link(TorchDispatchMode):
    """Notes what crosses between the host and the device, and does not do it."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[tuple[str, torch.dtype, torch.dtype, int]] = []  # from, its dtype, the other one's, elements
        self.blocking = 0  # copies that the thread would wait for

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and args[0].device != args[1].device:
            into, source, *more = args
            self.blocking += not any([*more, *(kwargs or {}).values()])
            self.copies.append((source.device.type, source.dtype, into.dtype, source.numel()))
            return into
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("num_ranks", [1, 2, 9])
def test_gradients_go_to_the_device_as_they_are(dtype: torch.dtype, num_ranks: int) -> None:
    grads = [torch.zeros(LENGTH, dtype=dtype) for _ in range(num_ranks)]
    with Link() as link:
        RankSum(LENGTH, META).sum(grads, range(num_ranks), 0, LENGTH)
    assert link.copies == [("cpu", dtype, dtype, LENGTH)] * num_ranks
    assert link.blocking == 0, "the thread queues them all, and the link is never idle in between"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_an_update_moves_each_ranks_gradient_and_the_parameters_once_in_their_dtype(dtype: torch.dtype) -> None:
    """2R + 2 bytes an element at 16 bits and R ranks."""
    master, mean, square = (torch.zeros(LENGTH, device=META) for _ in range(3))
    params = torch.zeros(LENGTH, dtype=dtype)
    memory = AdamMemory(master=master, states=plain_states(mean, square), params=params)
    options = AdamOptions.from_hyper(
        {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0}, decoupled=True
    )
    segment = Segment(offset=0, length=LENGTH, ranks=(0, 1), step=1, options=options)
    grads = [torch.zeros(LENGTH, dtype=dtype) for _ in range(2)]
    with Link() as link:
        TorchKernel(LENGTH, device=META).update(memory, grads, [segment], 0.5)
    assert link.copies == [("cpu", dtype, dtype, LENGTH)] * 2 + [("meta", dtype, dtype, LENGTH)]
    assert link.blocking == 0


def test_the_sum_over_a_link_has_the_bits_of_the_one_on_the_host() -> None:
    torch.manual_seed(3)
    grads = [torch.randn(LENGTH).bfloat16() for _ in range(11)]

    class Far(RankSum):
        """Takes every part for one on another device."""

        def _is_here(self, part: Tensor) -> bool:
            return False

    ranks = list(range(11))
    assert torch.equal(Far(LENGTH).sum(grads, ranks, 0, LENGTH), RankSum(LENGTH).sum(grads, ranks, 0, LENGTH))
