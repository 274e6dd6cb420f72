"""The stream of an owner's updates on a CUDA device: asked of CUDA by the owner's threads, without a device here."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from rayzero.kernels.torch_kernel import SideStream
from tests.cuda_streams import OURS, Cuda


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    return Cuda(monkeypatch)


def test_work_runs_on_the_stream_and_is_done_at_the_end_while_the_thread_sleeps(cuda: Cuda) -> None:
    side = SideStream(OURS)
    name = cuda.streams[-1].name
    with side.used():
        cuda.work("update")
    cuda.work("the model")
    assert cuda.take() == [f"update on {name}", f"record {name}#1", f"sleep until {name}#1", "the model on compute"]


def test_an_owners_thread_makes_no_context_on_another_device(cuda: Cuda) -> None:
    side = SideStream(OURS)

    def update() -> tuple[int, int]:
        with side.used():
            inside = cuda.current()
        return inside, cuda.current()

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(update).result() == (OURS.index, 0)
    assert cuda.contexts == {OURS.index}


@pytest.mark.parametrize("device", [None, torch.device("cpu"), torch.device("meta")])
def test_on_the_host_there_is_no_stream(device: torch.device | None, cuda: Cuda) -> None:
    with SideStream(device).used():
        pass
    assert cuda.streams == []
    assert cuda.take() == []
