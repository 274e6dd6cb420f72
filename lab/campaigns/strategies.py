"""Does a run outlive its memory limit because a strategy acts? Trains the same loop in a memory cgroup with each.

The loop makes a reference cycle with a tensor of 8 MiB in every step and has switched Python's collector off, as loops
do that want no pauses. One rank fetches over gRPC into buffers of its own. A first run without a limit and with the
collector measures what the loop really needs; the limit of the others is ``--room`` times that. A run that dies is
killed by the kernel's OOM killer. Those that live must end with the same weights as the first one.

It needs a memory cgroup below its own that it may make (version 1, or 2 where the parent has no processes), which on
most hosts is root's. The cgroup lies within the caller's own, so that no limit of the caller is evaded.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path("/sys/fs/cgroup")
OFF = "off"
SAMPLE_S = 0.1


# ---- a memory cgroup --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Group:
    """A memory cgroup; ``names``: its files for the limit, the usage and the cache."""

    path: Path
    names: tuple[str, str, str]

    def used(self) -> int:
        """Bytes in use that the kernel cannot reclaim at once."""
        stat = dict(line.split() for line in (self.path / "memory.stat").read_text().splitlines())
        return int((self.path / self.names[1]).read_text()) - int(stat[self.names[2]])

    def kills(self) -> int:
        """How many of its processes the OOM killer has killed."""
        file = self.path / "memory.events"
        text = (file if file.exists() else self.path / "memory.oom_control").read_text()
        return int(dict(line.split() for line in text.splitlines())["oom_kill"])


@contextmanager
def memory_group(limit: int | None) -> Iterator[Group]:
    """A cgroup below this process's own. Raises OSError where none can be made."""
    group = _below_own()
    group.path.mkdir()
    try:
        if not (group.path / group.names[0]).exists():
            raise OSError(f"{group.path.parent} gives its children no memory controller")
        if limit is not None:
            (group.path / group.names[0]).write_text(str(limit))
        yield group
    finally:
        _remove(group.path)


def _below_own() -> Group:
    name = f"rayzero-strategies-{os.getpid()}"
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        hierarchy, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            return Group(ROOT / "memory" / path.lstrip("/") / name, names)
        if hierarchy == "0" and (ROOT / "cgroup.controllers").exists():
            own = ROOT / path.lstrip("/")
            (own / "cgroup.subtree_control").write_text("+memory")  # EBUSY where ``own`` has processes
            return Group(own / name, ("memory.max", "memory.current", "inactive_file"))
    raise OSError("this host has no memory cgroups")


def _remove(path: Path) -> None:
    for _ in range(100):
        try:
            return path.rmdir()
        except OSError:  # a killed process is still being taken down
            time.sleep(0.05)
    raise OSError(f"{path} still has processes")


# ---- the loop, in a process of its own ----------------------------------------------------------------------------


def loop(strategy: str, steps: int, keep: bool) -> None:
    """Train and print a JSON line for each action, then one with a digest of the weights."""
    import torch
    from torch import nn

    import rayzero
    from rayzero.testing import run_ranks

    class Block(nn.Module):
        def __init__(self, width: int = 192) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(torch.relu(self.up(x)))

    class Kept:
        def __init__(self) -> None:
            self.me, self.tensor = self, torch.ones(2 << 20)

    torch.manual_seed(0)
    torch.set_num_threads(1)
    base, batch = nn.Sequential(*(Block() for _ in range(12))), torch.randn(64, 192)
    size = 4 * sum(param.numel() for param in base.parameters())
    config = rayzero.ZeroConfig(
        auto_memory_management=strategy, gpu_param_memory_budget=size * 11 // 12, cpu_memory_budget=1 << 30
    )
    if keep:
        gc.disable()

    def train(context: Any) -> str:
        model, optimizer = rayzero.prepare(base, torch.optim.SGD(base.parameters(), lr=1e-3))
        engine, before = optimizer.engine, {}
        for step in range(steps):
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            kept = Kept()
            del kept
            if not keep and step % 5 == 0:
                gc.collect()
            freed = {name: (one.count, one.bytes) for name, one in engine.memory.freed.items()}
            if freed != before:
                did = [name for name in freed if freed[name] != before.get(name)]
                size = sum((one[1] or 0) - (before.get(name, (0, 0))[1] or 0) for name, one in freed.items())
                print(json.dumps({"at": time.time(), "step": step, "did": did, "bytes": size}), flush=True)
                before = freed
        weights = rayzero.full_state_dict(model)
        return hashlib.sha256(b"".join(weights[name].numpy().tobytes() for name in sorted(weights))).hexdigest()

    (digest,) = run_ranks(train, 1, 1, "grpc", config=config)
    print(json.dumps({"digest": digest}), flush=True)


# ---- runs -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Run:
    """One run as seen from outside."""

    strategy: str
    limit: int | None  # bytes of the cgroup
    used: list[tuple[float, int]] = field(default_factory=list)  # seconds since the start, bytes
    actions: list[dict[str, Any]] = field(default_factory=list)
    digest: str | None = None  # None: it died
    code: int = 0
    kills: int = 0

    @property
    def killed(self) -> bool:
        """Whether the OOM killer ended it."""
        return self.code == -signal.SIGKILL and self.kills > 0


def run(strategy: str, limit: int | None, steps: int, *, keep: bool = True) -> Run:
    """Run the loop in a cgroup and watch it."""
    found = Run(strategy, limit)
    with memory_group(limit) as group:
        enter = f"open({str(group.path / 'cgroup.procs')!r}, 'w').write('0')"
        code = f"{enter}; import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r}); "
        code += f"from lab.campaigns.strategies import loop; loop({strategy!r}, {steps}, {keep})"
        began = time.time()
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            lines: list[str] = []
            reader = threading.Thread(target=lambda: lines.extend(child.stdout or ()))
            reader.start()
            try:
                while child.poll() is None:
                    found.used.append((time.time() - began, group.used()))
                    time.sleep(SAMPLE_S)
            finally:
                child.kill()
            reader.join()
        found.code, found.kills = child.returncode, group.kills()
    for line in map(json.loads, lines):
        if "digest" in line:
            found.digest = line["digest"]
        else:
            found.actions.append(line | {"at": line["at"] - began})
    return found


def tell(found: Run, digest: str | None) -> str:
    """One line about a run; ``digest``: of the weights that it should end with."""
    weights = "has the same weights" if found.digest == digest else "has OTHER weights"
    end = "was killed by the OOM killer" if found.killed else weights if found.digest else f"failed ({found.code})"
    freed = sum(action["bytes"] for action in found.actions) / (1 << 20)
    did = sorted({name for action in found.actions for name in action["did"]})
    peak = max(used for _, used in found.used) / (1 << 20)
    limit = "none" if found.limit is None else f"{found.limit >> 20} MiB"
    return (
        f"{found.strategy:<12} limit {limit:<9} peak {peak:>5.0f} MiB  {found.used[-1][0]:>5.1f} s  "
        f"{len(found.actions):>3} actions freed {freed:>6.0f} MiB ({', '.join(did) or '-'})  {end}"
    )


def draw(runs: list[Run], path: Path) -> None:
    """Draw each run's pressure, and its actions as marks on it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.subplots()
    for found in runs:
        assert found.limit is not None
        times = [at for at, _ in found.used]
        shares = [used / found.limit for _, used in found.used]
        end = "killed" if found.killed else "lives"
        (line,) = axes.plot(times, shares, lw=1.2, label=f"{found.strategy}: {end}")
        axes.plot(
            [action["at"] for action in found.actions],
            [_share_at(found, action["at"]) for action in found.actions],
            "v",
            ms=6,
            color=line.get_color(),
        )
        if found.killed:
            axes.plot(times[shares.index(max(shares))], max(shares), "X", ms=13, color=line.get_color())
    axes.axhline(1, color="black", lw=1, ls=":")
    axes.set(
        xlabel="seconds",
        ylabel="pressure: used over the cgroup's limit",
        ylim=(0, 1.08),
        title="A loop that keeps 8 MiB in cycles a step, by auto_memory_management\n▼ an action, ✕ the OOM killer",
    )
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=110)


def _share_at(found: Run, at: float) -> float:
    nearest = min(found.used, key=lambda sample: abs(sample[0] - at))
    return nearest[1] / (found.limit or 1)


def main() -> None:
    """Run, draw, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", nargs="+", default=[OFF, "conservative", "balanced", "aggressive", "extreme"])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--room", type=float, default=1.7, help="the limit over what the loop needs")
    parser.add_argument("--picture", type=Path, help="where to draw the runs")
    parser.add_argument("--json", action="store_true", help="print the outcomes as JSON")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the child and the cgroup go too
    free = run(OFF, None, options.steps, keep=False)
    limit = int(options.room * max(used for _, used in free.used))
    runs = [run(strategy, limit, options.steps) for strategy in options.strategies]
    for found in (free, *runs):
        print(tell(found, free.digest), file=sys.stderr if options.json else sys.stdout)
    if options.json:
        print(json.dumps([asdict(found) | {"killed": found.killed} for found in (free, *runs)]))
    if options.picture is not None:
        draw(runs, options.picture)
