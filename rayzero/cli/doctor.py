"""``rayzero doctor``: checks whether this machine has what a run needs. Every line was measured or tried."""

from __future__ import annotations

import functools
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rayzero.errors import ConfigError
from rayzero.files import to_json
from rayzero.quantities import count, format_bytes

if TYPE_CHECKING:  # only findings that look at slabs load torch
    from rayzero.slabs.sweep import FoundSlab

GIB = 1 << 30
_OWNERS = 8  # of the run for which open files are counted
_LEAST_SHM = 64 << 20  # bytes; many containers have as much, and Ray's object store takes more
_PACKAGES = ("rayzero", "torch", "ray", "grpcio", "protobuf", "pydantic", "safetensors")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one check."""

    name: str
    ok: bool | None  # None: for information, no run depends on it
    detail: str
    lines: tuple[str, ...] = ()  # one for each thing that was counted


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    sweep: Annotated[bool, typer.Option("--sweep", help="Only remove shared memory of dead processes.")] = False,
    slab_dir: Annotated[Path, typer.Option(help="Directory of the shared memory.")] = Path("/dev/shm"),
) -> None:
    """Check versions, hardware and limits, then run a training step over gRPC and one on a local Ray. The exit code is
    1 if something that a run needs is broken."""
    if sweep:
        typer.echo("\n".join(swept(slab_dir)))
        return
    findings = []
    for finding in examine(slab_dir):
        findings.append(finding)
        if not as_json:
            typer.echo(f"{_MARKS[finding.ok]} {finding.name:<14} {finding.detail}")
            for line in finding.lines:
                typer.echo(f"{'':<20}{line}")
    broken = [finding.name for finding in findings if finding.ok is False]
    if as_json:
        typer.echo(to_json({"ok": not broken, "findings": [asdict(finding) for finding in findings]}))
    else:
        typer.echo(f"broken: {', '.join(broken)}" if broken else "everything that a run needs works")
    raise typer.Exit(1 if broken else 0)


_MARKS = {True: "ok  ", False: "BAD ", None: "    "}


def examine(slab_dir: Path) -> Iterator[Finding]:
    """Yield the findings one by one, as they are made. ``slab_dir``: directory of the shared memory."""
    checks = (
        versions,
        cpu,
        gpu,
        memory,
        functools.partial(shared_memory, slab_dir),
        functools.partial(slabs, slab_dir),
        locked_memory,
        open_files,
        compiler,
        kernel,
        signals,
        step_over_grpc,
        step_on_ray,
    )
    for check in checks:
        yield guarded(check)


def guarded(check: Callable[[], Finding]) -> Finding:
    """Run a check. If it raises, the finding is broken and its detail is the error."""
    try:
        return check()
    except Exception as error:  # supervision: a broken installation may raise anything, and must be reported
        detail = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        name = (check.func if isinstance(check, functools.partial) else check).__name__
        return Finding(name=name.replace("_", " "), ok=False, detail=detail)


def versions() -> Finding:
    """Versions of Python and of the packages that a run loads."""
    found = {name: _version(name) for name in _PACKAGES}
    missing = [name for name, version in found.items() if version is None]
    said = [f"python {platform.python_version()}"] + [f"{name} {version}" for name, version in found.items() if version]
    wrong = [f"missing: {', '.join(missing)}"] if missing else []
    new_enough = sys.version_info >= (3, 11)
    return Finding(name="versions", ok=new_enough and not missing, detail=", ".join(said + wrong))


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def cpu() -> Finding:
    """Cores that this process may use, their NUMA nodes, and the vector instructions that torch uses."""
    import torch

    from rayzero.cluster.nodes.numa import numa_nodes

    allowed = os.sched_getaffinity(0)
    cores, nodes = len(allowed), sum(bool(node & allowed) for node in numa_nodes())
    on = f" on {nodes} NUMA nodes" if nodes > 1 else ""
    quota = _cpu_quota()
    limit = f", cgroup allows {quota:g}" if quota is not None else ""
    detail = f"{cores} cores{on}{limit}, {platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"
    return Finding(name="cpu", ok=None, detail=detail)


def _cpu_quota(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """How many CPUs this process's cgroup (v2, or v1 at its root) may use; None: no limit."""
    try:
        if (root / "cpu.max").exists():
            quota, period = (root / "cpu.max").read_text().split()
        else:
            quota = (root / "cpu" / "cpu.cfs_quota_us").read_text().strip()
            period = (root / "cpu" / "cpu.cfs_period_us").read_text().strip()
    except OSError:
        return None
    return None if quota in ("max", "-1") else int(quota) / int(period)


def gpu() -> Finding:
    """The CUDA devices that torch sees."""
    import torch

    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return Finding(name="gpu", ok=None, detail=", ".join(names) or "none: ranks run on the CPU")


def memory() -> Finding:
    """Memory that a run may still take, as RAM and cgroups limit it."""
    from rayzero.memory.process_memory import host_limits

    limits = host_limits()
    detail = f"{limits.available / GIB:.1f} GiB free of {limits.total / GIB:.1f} GiB ({limits.source})"
    return Finding(name="memory", ok=None, detail=detail)


def shared_memory(slab_dir: Path) -> Finding:
    """Room where ranks and owners of a host share memory, and how large its pages are; Ray keeps its object store in
    /dev/shm."""
    usage = shutil.disk_usage(slab_dir)
    with tempfile.TemporaryFile(dir=slab_dir) as file:
        os.posix_fallocate(file.fileno(), 0, 1 << 20)
        pages = "huge pages" if _makes_huge_pages(file.fileno()) else "small pages only, updates take a seventh longer"
    room = f"{slab_dir} {usage.free / GIB:.2f} GiB free of {usage.total / GIB:.2f} GiB"
    detail, enough = f"{room}, writable, {pages}", True
    if usage.free < _LEAST_SHM:
        detail, enough = f"{detail}; at least {format_bytes(_LEAST_SHM)} are needed: docker --shm-size", False
    return Finding(name="shared memory", ok=enough, detail=detail)


def _makes_huge_pages(fd: int) -> bool:
    from rayzero.memory.mapping import Mapping, huge_page

    if (size := huge_page()) > GIB:  # there are none
        return False
    os.ftruncate(fd, size)
    return Mapping.of_file(fd, size, writable=True).make_huge(0, size)


def slabs(slab_dir: Path) -> Finding:
    """Shared memory of runs that are alive, and what dead ones left."""
    from rayzero.slabs.sweep import list_slabs

    found = list_slabs(slab_dir)
    return Finding(
        name="slabs", ok=None, detail=slab_sum(found, slab_dir), lines=(*slab_lines(found), *dead_run_lines(found))
    )


def slab_lines(slabs: Sequence[FoundSlab]) -> list[str]:
    """A line for each slab: which process made it, and whether that is still alive."""

    def whose(slab: FoundSlab) -> str:
        if slab.header is None:
            return "incomplete, or of another version"
        facts = slab.header.facts
        return f"{facts.role} {facts.index} of run {facts.run}, pid {slab.header.pid}"

    return [f"{s.path}: {format_bytes(s.bytes)}, {whose(s)}, {'in use' if s.alive else 'DEAD'}" for s in slabs]


def slab_sum(slabs: Sequence[FoundSlab], directory: Path) -> str:
    """Sum up the slabs in one line, which says how to remove those of dead processes."""
    dead = [slab for slab in slabs if not slab.alive]
    said = f"{len(slabs)} in {directory}, {format_bytes(sum(slab.bytes for slab in slabs))}"
    if not dead:
        return said
    return f"{said}; {len(dead)} of dead processes, {format_bytes(sum(s.bytes for s in dead))}: rayzero doctor --sweep"


def dead_run_lines(slabs: Sequence[FoundSlab]) -> list[str]:
    """A line for each run that has lost an owner: whether its shared memory can still be used."""
    from rayzero.store.shm.recovery import assess, dead_runs
    from rayzero.store.shm.signals import available

    if available() is not None:  # no process could share memory here
        return []
    found = [(run.run, assess(run)) for run in dead_runs(slabs)]
    return [f"run {run}: {verdict.outcome}: {verdict.reason}" for run, verdict in found]


def swept(directory: Path) -> list[str]:
    """Remove the slabs of dead processes; returns a line for each, and their sum. Raises ConfigError if
    ``directory`` is none."""
    if not directory.is_dir():
        raise ConfigError(f"--slab-dir is {str(directory)!r}, which is not a directory here: name the runs'")
    from rayzero.slabs.sweep import end_hold, held_in, list_slabs, sweep

    runs = dead_run_lines(list_slabs(directory))
    for held in held_in(directory):
        if held.step is not None:  # its janitor has nothing to do any more but to keep it
            end_hold(directory, held.lineage)
    removed = sweep(directory)
    lines = [f"removed {path}: {format_bytes(size)}" for path, size in removed]
    return [
        *runs,
        *lines,
        f"slabs of dead processes removed: {len(removed)}, {format_bytes(sum(size for _, size in removed))}",
    ]


def locked_memory() -> Finding:
    """How much memory a process may page-lock."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft / (1 << 20):.0f} MiB"
    return Finding(name="locked memory", ok=None, detail=f"RLIMIT_MEMLOCK {limit}")


def open_files() -> Finding:
    """How many files and connections a process of a run may have open here, and for how many ranks that is enough."""
    from rayzero.cluster.nodes.resources import files_of_owner, most_ranks
    from rayzero.concurrency.processes import open_files_allowed

    allowed = open_files_allowed(*resource.getrlimit(resource.RLIMIT_NOFILE))
    ranks, owners = count(most_ranks(allowed, _OWNERS), "rank"), count(_OWNERS, "optimizer")
    return Finding(
        name="open files",
        ok=files_of_owner(1, 1, 1) <= allowed,
        detail=f"{allowed:,}: enough for {ranks} with {owners}",
    )


def compiler() -> Finding:
    """The C compiler, and whether a program that it compiles runs."""
    found = next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)
    if found is None:
        return Finding(name="C compiler", ok=None, detail="none")
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder) / "probe.c", Path(folder) / "probe"
        source.write_text("int main(void) { return 42; }\n")
        made = subprocess.run([found, str(source), "-o", str(program)], capture_output=True, text=True, timeout=60)
        works = made.returncode == 0 and subprocess.run([str(program)], timeout=60).returncode == 42
    said = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=60).stdout.partition("\n")[0]
    return Finding(name="C compiler", ok=None, detail=f"{found}: {said}" + ("" if works else " (does not work)"))


def kernel() -> Finding:
    """The update kernel that a run would choose, and why if it is not the native one."""
    from rayzero.kernels.native import NativeKernel, why_not

    reason = why_not()
    detail = f"native ({NativeKernel().isa})" if reason is None else f"torch, not native: {reason}"
    return Finding(name="kernel", ok=True, detail=detail)


def signals() -> Finding:
    """Whether processes can wake each other through shared memory, and if not, why."""
    from rayzero.store.shm.signals import available

    reason = available()
    detail = "futexes in shared memory" if reason is None else f"none, so processes of a host use gRPC: {reason}"
    return Finding(name="signals", ok=None, detail=detail)


def one_step() -> float:
    """A training loop of one rank that takes a step; returns by how much the step lowered the loss."""
    import torch
    import torch.nn.functional as F

    from rayzero.engine import get_context, prepare, report

    torch.manual_seed(0)
    plain = torch.nn.Linear(8, 8)
    model, optimizer = prepare(plain, torch.optim.AdamW(plain.parameters(), lr=0.01))
    inputs = torch.randn(4, 8, dtype=torch.float32, device="cpu")
    losses = []
    for _ in range(2):
        loss = F.mse_loss(model(inputs), inputs)
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    gain = losses[0] - losses[1]
    report({"gain": gain, "rank": get_context().rank})
    return gain


def step_over_grpc() -> Finding:
    """A real training step in this process, with an owner behind gRPC."""
    from rayzero.testing import run_ranks

    (gain,) = run_ranks(lambda ctx: one_step(), world_size=1, num_optimizers=1, transport="grpc")
    return Finding(name="grpc", ok=gain > 0, detail=f"a training step over loopback lowered the loss by {gain:.2g}")


def step_on_ray() -> Finding:
    """A real training step on Ray, with a rank worker, an optimizer actor and a coordinator, in a temporary folder."""
    from rayzero.cluster.driver import ZeroTrainer
    from rayzero.config import RunConfig, ScalingConfig

    with tempfile.TemporaryDirectory() as folder:
        trainer = ZeroTrainer(
            one_step,
            scaling_config=ScalingConfig(num_workers=1, num_optimizers=1),
            run_config=RunConfig(name="doctor", storage_path=folder),
        )
        result = trainer.fit()
    gain = result.metrics["gain"]
    return Finding(name="ray", ok=gain > 0, detail=f"a training step on Ray took {result.seconds:.0f} s in all")
