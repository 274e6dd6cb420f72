"""A sweep with Ray Tune over RayZero runs: each trial trains a tiny GPT with another learning rate.

A trial is the driver of a run with its own ranks and optimizer actors. Prints the loss of each, and the best one.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch

import rayzero


def loop(config: dict[str, Any]) -> None:
    """The loop that every rank of every trial runs: next bytes of a text."""
    from rayzero.recipes.model import GPT
    from rayzero.recipes.recipe import GPTConfig

    context = rayzero.get_context()
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=128, seq_len=32, num_layers=2, num_heads=2, dim=32, tie_embeddings=False))
    model, optimizer = rayzero.prepare(model, torch.optim.AdamW(model.parameters(), lr=config["lr"]))
    text = torch.tensor(list(config["text"].encode("ascii", "ignore")))
    for step in range(config["steps"]):
        torch.manual_seed(1000 * step + context.rank)
        starts = torch.randint(0, len(text) - 33, (8, 1))
        tokens = text[starts + torch.arange(33)]
        logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        rayzero.report({"loss": rayzero.mean_over_ranks(loss.item())})


def trial(config: dict[str, Any]) -> None:
    """One trial of Tune: a whole run. What rank 0 reports becomes what the trial reports."""
    from ray import tune

    def pass_on(report: Any) -> None:
        if report.rank == 0:
            tune.report({"step": report.step, **report.metrics})

    rayzero.ZeroTrainer(
        loop,
        train_loop_config=config,
        scaling_config=rayzero.ScalingConfig(
            num_workers=config["workers"], num_optimizers=1, cpus_per_worker=0.4, cpus_per_optimizer=0.2
        ),
        run_config=rayzero.RunConfig(name=f"lr-{config['lr']:g}", storage_path=config["place"]),
        on_report=pass_on,
        on_phase=lambda phase: None,
    ).fit()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-4, 1e-2])
    args = parser.parse_args()

    import ray
    from ray import tune

    text = Path(rayzero.__file__).read_text() * 4
    with tempfile.TemporaryDirectory() as folder, ray.init(include_dashboard=False, log_to_driver=False):
        tuner = tune.Tuner(
            tune.with_resources(trial, {"CPU": 0.1}),  # of the trial itself; the run asks for its own
            param_space={
                "lr": tune.grid_search(args.lr),
                "steps": args.steps,
                "workers": args.workers,
                "text": text,
                "place": f"{folder}/runs",
            },
            tune_config=tune.TuneConfig(metric="loss", mode="min", max_concurrent_trials=1),  # as many as have room
            run_config=tune.RunConfig(name="sweep", storage_path=f"{folder}/tune", verbose=0),
        )
        results = tuner.fit()
        for result in results:
            if result.error is not None:
                raise result.error
            last = result.metrics
            print(f"lr {result.config['lr']:g}  step {last['step']}  loss {last['loss']:.3f}")
        print(f"best: lr {results.get_best_result().config['lr']:g}")


if __name__ == "__main__":
    main()
