"""Everything about RayZero that only a GPU can show, in parts that take at most 25 minutes together.

    scripts/gpu [--minutes 25] [--parts tests limits ...] [--again] [--results DIR]
    scripts/gpu --simulate                      # the same code on the CPU, at small sizes

Each part is a process with a limit of its own, and writes ``gpu-PART.json`` as it ends. Started again, the campaign
goes on with what is missing: parts that have ended on the same commit and device are not run again (``--again``: they
are). A part that is cut off, or whose tool is not there, says so in the table and does not stop the others; the exit
status is 1 if one has failed. Needs torch and this package, not Ray.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch

from rayzero.files import replace_file

ROOT = Path(__file__).parents[2]
LAB = [sys.executable, "-m", "lab"]
STEPS = (  # size, tokens: what says most comes first, because time may end
    ("1.3b", 8192),
    ("7b", 16384),
    ("3b", 8192),
    ("1.3b", 32768),
    ("7b", 65536),
    ("1.3b", 4096),
    ("3b", 32768),
    ("1.3b", 65536),
    ("7b", 4096),
)
LEAST_S = 20.0  # with less left, no further part is begun

End = Literal["done", "failed", "out of time", "not there"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part of the campaign."""

    name: str
    command: list[str]
    limit_s: float
    read: Callable[[str], dict[str, Any]]  # figures from what it prints
    tool: str | None = None  # a program that it needs
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How a part ended."""

    part: str
    end: End
    seconds: float
    commit: str
    device: str
    figures: dict[str, Any] = field(default_factory=dict)
    why: str = ""  # if it is not done


# ---- parts ------------------------------------------------------------------------------------------------------


def parts(*, simulate: bool) -> list[Part]:
    """All parts, in their order."""
    one_step = [*LAB, "gpu_one_step"]
    small = ["--layers", "6", "--width", "64", "--rows", "8", "--simulate"] if simulate else []
    watched = small or ["--layers", "3", "--width", "512", "--rows", "256", "--steps", "2"]
    checks = ["compute-sanitizer", "--error-exitcode", "1", "--target-processes", "all"]
    step = [*LAB, "gpu_step", "--json"]
    steps = ["--rounds", "1", "--steps", "1", "--device", "cpu", "--threads", "1", "--without", "fsdp2", "deepspeed"]
    sizes = (("tiny", 128),) if simulate else STEPS
    shape = ["--layers", "2", "--width", "64", "--tokens", "64", "--rounds", "1"] if simulate else []
    tensors = ["--layers", "8", "--width", "16", "--rounds", "1", "--repeats", "1"] if simulate else []
    tensors = tensors or ["--device", "cuda"]
    return [
        Part(
            name="tests",
            command=[sys.executable, "-m", "pytest", "-m", "gpu", "-rs", "--no-header", *test_files()],
            limit_s=240,
            read=read_tests,
        ),
        Part(
            name="orders",
            command=[*one_step, *watched],
            limit_s=120,
            read=read_json,
            environment={} if simulate else {"TORCH_CUDA_SANITIZER": "1"},
        ),
        Part(
            name="memcheck",
            command=[*checks, *one_step, *watched],
            limit_s=240,
            read=read_last_json,
            tool="compute-sanitizer",
        ),
        Part(name="limits", command=[*step, "--only-limits", *(steps if simulate else [])], limit_s=90, read=read_json),
        Part(name="overlap", command=[*one_step, *small], limit_s=120, read=read_json),
        *(
            Part(
                name=f"step-{size}-{tokens}",
                command=[
                    *step,
                    *("--sizes", size, "--tokens", str(tokens)),
                    *(steps if simulate else ["--rounds", "2", "--steps", "3"]),
                ],
                limit_s=300,
                read=read_json,
            )
            for size, tokens in sizes
        ),
        Part(
            name="activations",
            command=[*LAB, "activations", "--json", *shape],
            limit_s=120,
            read=read_json,
        ),
        Part(
            name="hybrid",
            command=[*LAB, "hybrid", "--json", *tensors],
            limit_s=120,
            read=read_json,
        ),
    ]


def test_files() -> list[str]:
    """The files with tests that need a CUDA device: others may need what is not on the machine."""
    tests = ROOT / "tests"
    return [str(path) for path in sorted(tests.rglob("test_*.py")) if "mark.gpu" in path.read_text()]


def read_tests(said: str) -> dict[str, Any]:
    """What pytest's last line counts, and what is skipped."""
    words = [line for line in said.splitlines() if " in " in line][-1].replace(",", "").replace("=", "").split()
    return {word: int(number) for number, word in pairwise(words) if number.isdigit()}


def read_json(said: str) -> dict[str, Any]:
    """All of it."""
    found: dict[str, Any] = json.loads(said)
    return found


def read_last_json(said: str) -> dict[str, Any]:
    """Its only line of JSON: a tool prints around it."""
    return read_json(next(line for line in said.splitlines() if line.startswith("{")))


# ---- running them -----------------------------------------------------------------------------------------------


def run(part: Part, limit_s: float, commit: str, device: str) -> Result:
    """Run a part in a process group of its own, for at most ``limit_s``."""
    began = time.monotonic()

    def result(end: End, figures: dict[str, Any] | None = None, why: str = "") -> Result:
        seconds = round(time.monotonic() - began, 1)
        return Result(
            part=part.name, end=end, seconds=seconds, commit=commit, device=device, figures=figures or {}, why=why
        )

    if part.tool is not None and shutil.which(part.tool) is None:
        return result("not there", why=f"{part.tool} is not on this machine")
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, **part.environment, "PYTHONPATH": paths}
    with subprocess.Popen(
        part.command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            said, complained = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.communicate()
            return result("out of time", why=f"it took longer than {limit_s:.0f} s")
    if process.returncode:
        return result("failed", why=(complained.strip() or said.strip())[-2000:])
    try:
        return result("done", part.read(said))
    except (ValueError, IndexError, StopIteration) as error:
        return result("failed", why=f"it printed what cannot be read ({error!r}): {said[-500:]}")


def save(result: Result, folder: Path) -> None:
    """Write a result, whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / f"gpu-{result.part}.json", json.dumps(asdict(result), indent=1) + "\n")


def saved(part: str, folder: Path, commit: str, device: str) -> Result | None:
    """The result of a part that has ended on this commit and device."""
    try:
        found = Result(**json.loads((folder / f"gpu-{part}.json").read_text()))
    except (FileNotFoundError, ValueError, TypeError):
        return None
    return found if (found.commit, found.device, found.end) == (commit, device, "done") else None


def commit_here() -> str:
    """The commit of this checkout, "+" with changes of more than results; "unknown" outside one."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    found = git("rev-parse", "--short", "HEAD") if shutil.which("git") else ""
    return found + "+" * bool(git("status", "--porcelain", "rayzero", "lab", ":!lab/results")) if found else "unknown"


# ---- the table --------------------------------------------------------------------------------------------------


def line_of(result: Result) -> str:
    """The part as a row of the table."""
    return f"| {result.part} | {result.end} | {result.seconds:.0f} | {summary(result)} |"


def summary(result: Result) -> str:
    """A part's main figures in a few words."""
    if result.end != "done":
        return result.why.splitlines()[-1][:160] if result.why else ""
    if "rows" not in result.figures:
        return ", ".join(f"{name} {short(value)}" for name, value in flat(result.figures))
    told = []
    for row in result.figures["rows"]:
        of = f" ({row['of_ceiling']:.2f} of plain)" if row.get("of_ceiling") is not None else ""
        told.append(row["absent"][:60] if "absent" in row else f"{row['name']} {row['step_s']['median']:.3f} s{of}")
    return "; ".join(told)


def flat(figures: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The figures by name, those inside others as "other.name"."""
    for name, value in figures.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{name}.")
        elif not isinstance(value, list):
            yield prefix + name, value


def short(value: Any) -> str:
    """A figure with three digits."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing; 1 if a part has failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulate", action="store_true", help="on the CPU, at small sizes")
    parser.add_argument("--minutes", type=float, default=25.0, help="for all parts together")
    parser.add_argument("--parts", nargs="+", metavar="PART", help="only these")
    parser.add_argument("--again", action="store_true", help="also what has ended")
    parser.add_argument("--results", type=Path, help="where they are, and will be")
    args = parser.parse_args(argv)
    if not args.simulate and not torch.cuda.is_available():
        raise SystemExit("no CUDA device here (torch.cuda.is_available() is False); --simulate walks the same code")
    known = parts(simulate=args.simulate)
    names = [part.name for part in known]
    if unknown := [name for name in args.parts or () if name not in names]:
        raise SystemExit(f"--parts has {unknown}; there are {', '.join(names)}")
    folder = args.results or (Path("runs/gpu-simulated") if args.simulate else ROOT / "lab" / "results")
    device = "simulated" if args.simulate else torch.cuda.get_device_name()
    commit, deadline = commit_here(), time.monotonic() + 60 * args.minutes
    print(f"{device}, torch {torch.__version__}, commit {commit}\n")
    print("| part | end | seconds | figures |\n|---|---|--:|---|")
    results = []
    for part in [part for part in known if not args.parts or part.name in args.parts]:
        result = None if args.again else saved(part.name, folder, commit, device)
        if result is None:
            left = deadline - time.monotonic()
            if left < LEAST_S:
                why = f"the {args.minutes:g} minutes are over"
                result = Result(part=part.name, end="out of time", seconds=0, commit=commit, device=device, why=why)
            else:
                result = run(part, min(part.limit_s, left), commit, device)
            save(result, folder)
        results.append(result)
        print(line_of(result), flush=True)
    return int(any(result.end == "failed" for result in results))
