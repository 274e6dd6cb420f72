"""An update whose process was killed becomes whole when it is called again, wherever the process was killed."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from rayzero.errors import StoreError
from rayzero.kernels import choose_kernel
from rayzero.kernels.kernel import AdamMemory, AdamOptions, Segment
from rayzero.kernels.native import load
from rayzero.kernels.stamps import STAMP, UNDO_BYTES, TileStamps
from tests.support.reference_kernel import plain_states

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "rayzero" / "kernels" / "native"
OPTIONS = AdamOptions(lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1)


def compiler() -> list[str] | None:
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: list[str] | None = module.find_compiler()
    return found


@pytest.fixture(scope="module")
def crash_points(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs crash_points.c: (kills, states that differ)."""
    cc = compiler()
    if cc is None or isinstance(load(), str):
        pytest.skip("the native kernel is not built here")
    program = tmp_path_factory.mktemp("crash") / "crash_points"
    flags = ["-std=gnu11", "-O2", "-pthread", "-ffp-contract=off", "-fno-math-errno", f"-I{SOURCE}"]
    subprocess.run([*cc, *flags, str(Path(__file__).with_name("crash_points.c")), "-o", str(program), "-lm"])

    def run(*args: object) -> tuple[int, int]:
        done = subprocess.run([program, *map(str, args)], capture_output=True, text=True, check=True, timeout=120)
        _, kills, _, different = done.stdout.split()
        return int(kills), int(different)

    return run


@pytest.mark.parametrize("moments", ["fp32", "amsgrad", "bf16", "int8", "split"])
def test_a_kill_at_any_point_of_an_update_or_of_its_recovery_changes_no_bit(crash_points: Any, moments: str) -> None:
    kills, different = crash_points("every", moments, 1)
    assert kills > 5000
    assert different == 0


def test_without_the_undo_log_nearly_every_kill_is_noticed(crash_points: Any) -> None:
    kills, different = crash_points("every", "fp32", 0)
    assert different > 0.5 * kills


def test_a_kill_at_any_point_of_a_round_leaves_what_makes_the_total_what_it_was(crash_points: Any) -> None:
    kills, different = crash_points("round")
    assert kills > 15
    assert different == 0


def test_threads_that_are_killed_at_random_change_no_bit(crash_points: Any) -> None:
    kills, different = crash_points("random", "fp32", 300)
    assert kills >= 300
    assert different == 0


# ---- the same call again, by any kernel


def memory_of(numel: int, stamps: TileStamps) -> AdamMemory:
    torch.manual_seed(1)
    master, mean, square = torch.randn(numel), torch.randn(numel), torch.rand(numel)
    params = master.bfloat16()
    return AdamMemory(master=master, states=plain_states(mean, square), params=params, stamps=stamps)


def update(kernel: str, memory: AdamMemory, numel: int) -> None:
    gradient = torch.linspace(-1, 1, numel)
    segment = Segment(offset=0, length=numel, ranks=(0,), options=OPTIONS, step=3)
    choose_kernel(kernel).update(memory, [gradient], [segment], 1.0)


def stamps(numel: int, *, undo: bool) -> TileStamps:
    log = torch.zeros(2, UNDO_BYTES, dtype=torch.uint8) if undo else None
    return TileStamps(torch.zeros(-(-numel // STAMP), dtype=torch.int64), 3, 0, log)


@pytest.mark.parametrize("kernel", ["native", "torch"])
def test_an_update_that_is_asked_for_again_changes_nothing(kernel: str) -> None:
    numel = 2 * STAMP + 64
    memory = memory_of(numel, stamps(numel, undo=kernel == "native"))
    update(kernel, memory, numel)
    assert memory.stamps is not None
    assert set(memory.stamps.words.tolist()) == {6}
    before = memory.master.clone()
    update(kernel, memory, numel)
    assert torch.equal(memory.master, before)


def test_a_torn_tile_without_an_undo_log_is_refused() -> None:
    memory = memory_of(128, stamps(128, undo=False))
    assert memory.stamps is not None
    memory.stamps.words[0] = 5
    with pytest.raises(StoreError, match="only kernel='native' has an undo log: resume from a checkpoint"):
        update("torch", memory, 128)


def test_the_undo_log_changes_no_bit() -> None:
    numel = 3 * STAMP
    plain, kept = memory_of(numel, stamps(numel, undo=False)), memory_of(numel, stamps(numel, undo=True))
    for memory in (plain, kept):
        update("native", memory, numel)
    assert torch.equal(plain.master, kept.master)
    assert plain.params is not None
    assert kept.params is not None
    assert torch.equal(plain.params, kept.params)
