"""Uses Ray Train's TorchTrainer with RayZero: two workers learn a small regression, stop, and resume from a checkpoint.

Prints the last loss that was reported to Ray Train; the second fit continues where the first one ended.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import rayzero


def loop(config: dict[str, Any]) -> None:
    """The loop that every worker of Ray Train runs."""
    from ray import train

    latest = train.get_checkpoint()  # of this fit: its workers may have been started again
    resume = config["resume"] if latest is None else latest.path
    with config["owners"].rank(resume=resume) as context:  # the only additional line
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4)), nn.Linear(32, 1))
        model, optimizer = rayzero.prepare(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
        rayzero.track(scheduler=scheduler)  # saved with each checkpoint, and loaded by this call
        end = config["end"]
        for step in range(context.step, end):  # from 0, the checkpoint's step, or the one that was open at a death
            torch.manual_seed(1000 * step + context.rank)
            inputs = torch.randn(64, 32)
            loss = F.mse_loss(model(inputs), inputs[:, :4].sum(1, keepdim=True))
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            last = step + 1 == end
            checkpoint = None
            if last:
                saved = rayzero.save_checkpoint(optimizer, Path(config["place"]) / f"step-{end}")
                checkpoint = train.Checkpoint.from_directory(saved.path) if context.rank == 0 else None
            if last or step == config["begin"]:
                loss_then = None if context.repeating else loss.item()  # after a death it may be of newer weights
                train.report({"step": step + 1, "loss": loss_then}, checkpoint=checkpoint)


def fit(workers: int, optimizers: int, begin: int, end: int, place: Path, resume: str | None) -> Any:
    """Run Ray Train once; returns its result."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    from rayzero.integrations.ray_train import optimizer_actors

    with optimizer_actors(num_optimizers=optimizers, cpus_per_optimizer=0.5) as owners:
        trainer = TorchTrainer(
            loop,
            train_loop_config={"owners": owners, "begin": begin, "end": end, "place": str(place), "resume": resume},
            scaling_config=ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 0.5}),
            run_config=RunConfig(
                name=f"from-{begin}",
                storage_path=str(place / "ray_train"),
                failure_config=FailureConfig(max_failures=3),  # workers that die are started again
            ),
        )
        return trainer.fit()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--optimizers", type=int, default=1)
    parser.add_argument("--fits", type=int, default=2, help="each continues from the last one's checkpoint")
    args = parser.parse_args()

    import ray

    with tempfile.TemporaryDirectory() as folder, ray.init(include_dashboard=False, log_to_driver=False):
        place, resume = Path(folder), None
        for number in range(args.fits):
            begin, end = number * args.steps, (number + 1) * args.steps
            result = fit(args.workers, args.optimizers, begin, end, place, resume)
            resume = result.checkpoint.path
            print(
                f"step {result.metrics['step']:3d}  loss {result.metrics['loss']:.3f}  checkpoint {Path(resume).name}"
            )


if __name__ == "__main__":
    main()
