"""Rule 2: nothing is allocated inside a step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from store.toy import make_spec
from torch.profiler import ProfilerActivity, profile

from rayzero.kernels import AdamMemory, AdamOptions, Segment, choose_kernel, choose_squares
from rayzero.owner.gradients.landing import Landing, RankGradients
from rayzero.owner.memory import HostMemory
from rayzero.owner.shard import allocate
from rayzero.protocol.messages import Contribution, pack_presence
from tests.support.reference_kernel import plain_states

BF16 = torch.bfloat16
NUMEL = 64 * 20_000


def allocated(work: Callable[[], object]) -> int:
    """Bytes of tensor memory that ``work`` allocates, not counting what it frees again."""
    work()  # what is made once is made now
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        work()
    return sum(max(0, event.self_cpu_memory_usage) for event in found.events())


def test_the_measure_sees_an_allocation() -> None:
    assert allocated(lambda: torch.zeros(1000) + 1) >= 4000


@pytest.mark.promise("bounded", "optimizers")
@pytest.mark.parametrize("kernel", ["torch", "auto"])
@pytest.mark.parametrize("ranks", [1, 3, 10])
def test_an_update_allocates_nothing(kernel: str, ranks: int) -> None:
    options = AdamOptions(lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1)
    segment = Segment(offset=0, length=NUMEL, ranks=tuple(range(ranks)), options=options, step=3)
    states = [torch.zeros(NUMEL) for _ in range(3)]
    params = torch.zeros(NUMEL, dtype=BF16)
    memory = AdamMemory(master=states[0], states=plain_states(*states[1:]), params=params)
    grads = [torch.ones(NUMEL, dtype=BF16) for _ in range(ranks)]
    computing = choose_kernel(kernel)
    assert allocated(lambda: computing.update(memory, grads, [segment], 0.5)) < 1000


@pytest.mark.parametrize("kernel", ["torch", "native"])
@pytest.mark.parametrize("ranks", [1, 10])
def test_a_norm_part_allocates_nothing(kernel: str, ranks: int) -> None:
    if kernel == "native" and choose_kernel("auto").name != "native":
        pytest.skip("no native kernel here")
    grads = [torch.ones(NUMEL, dtype=BF16) for _ in range(ranks)]
    squares = choose_squares(kernel)
    assert allocated(lambda: squares.parts(grads, range(ranks), [(0, NUMEL - 7)])[0]) < 1000


@pytest.mark.parametrize("accumulation_steps", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_landing_a_push_allocates_nothing(accumulation_steps: int, dtype: torch.dtype) -> None:
    spec = make_spec(1, dtypes=[dtype] * 3, accumulation_steps=accumulation_steps)
    shards = allocate(spec, range(11), (), HostMemory(), room=None, splits=False)
    rank = RankGradients(0, list(shards.values()), spec)
    owned, landing = shards[3], rank.landings[3]
    assert isinstance(landing, Landing)
    seq = 0

    def land() -> None:
        nonlocal seq
        presence = pack_presence([True] * 4)
        push = Contribution(step=0, attempt=0, rank=0, unit=1, seq=seq, presence=presence)
        if accumulation_steps > 1:
            landing.staged = rank.lease(owned)
        landing.open(push)
        assert landing.begin(push)
        landing.absorb(push)
        rank.release(landing.complete(push))
        seq += 1

    assert allocated(land) < 1000
