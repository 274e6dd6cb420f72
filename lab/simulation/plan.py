"""Plans a recipe's run as ``rayzero plan`` does, and simulates one of its steps on the planned hosts.

    python -m lab plan --figures here.json my.yaml --gpus 8 --gpu-memory 80GiB --flops 989 --link 55

``here.json`` is from ``python -m lab simulation --save``: kernels and RayZero's own code. Speeds of the hosts are the
plan's.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from lab.simulation.machines import Measured
from rayzero.cli.plan import check_plan, format_plan, make_plan, plan
from rayzero.files import to_json
from rayzero.quantities import count

if TYPE_CHECKING:
    from lab.simulation.cluster import Simulated
    from rayzero.recipes.planning import RecipePlan


def simulate_plan(planned: RecipePlan, measured: Measured) -> Simulated:
    """A step of the planned run. Raises what ``simulate_step`` raises."""
    # not before the plan is made, which measures what a program's imports take
    from lab.simulation.planned_step import simulate_step

    work, recipe = planned.of, planned.of.recipe
    return simulate_step(
        work.layout,
        work.root,
        work.work,
        recipe.zero_config,
        recipe.scaling,
        planned.hardware,
        measured,
        state_bytes=work.state_bytes,
        splits=work.splits,
    )


def text_of(simulated: Simulated) -> str:
    """A simulated step for people."""
    waits = ", ".join(f"{cause} {seconds:.4g}" for cause, seconds in simulated.waits.items())
    return (
        f"simulated: a step takes {simulated.seconds:.4g} s, of which the slowest rank waits for {waits} s; "
        f"the lead takes and sends {count(simulated.lead_messages, 'message')}, busy for {simulated.lead:.1%} of it"
    )


def parser() -> argparse.ArgumentParser:
    """The options that ``rayzero plan`` does not have."""
    found = argparse.ArgumentParser(
        prog="python -m lab plan",
        usage="python -m lab plan --figures FILE [RECIPE.yaml] [key=value]... [OPTIONS of rayzero plan]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    found.add_argument("--figures", type=Path, required=True, help="a file of python -m lab simulation --save")
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command: plan, simulate and print. Raises MemoryPlanError or ConfigError if the run cannot fit."""
    own, options = parser().parse_known_args(argv)
    measured = Measured.read(own.figures)

    def show(*, as_json: bool, **described: Any) -> None:
        planned = make_plan(**described)
        simulated = simulate_plan(planned, measured)
        if as_json:
            print(to_json(planned.to_json() | {"simulated": simulated.to_json()}))
        else:
            print(f"{format_plan(planned)}\n{text_of(simulated)}")
        check_plan(planned)

    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(plan)
    command = typer.main.get_command(app)
    command.callback = show  # which gets what rayzero plan would
    command.main(options, prog_name="python -m lab plan")
