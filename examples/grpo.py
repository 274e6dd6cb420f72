"""Teaches a small Llama to add by reinforcement (GRPO): RayZero trains on a local Ray, a vLLM server generates.

Needs `scripts/vllm`, or another vLLM with RayZero in its environment (--vllm). The reward is 1 for the right sum, else
0. A few supervised steps come first, so that some answers are right. vLLM has each version of the weights from the
run's own memory; each sample says which version has made it, and with which probability. Prints the reward by step.

On-policy, ranks wait while vLLM generates; with --ahead, it generates the next step's batch meanwhile, with weights one
version older. A rank, an optimizer actor or the server may be killed: another one takes its place.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import torch
from torch import Tensor
from torch.nn import functional as F

import rayzero

ROOT = Path(__file__).resolve().parents[1]
LETTERS = "0123456789+="
PAD, END = len(LETTERS), len(LETTERS) + 1  # tokens after those of LETTERS
LONGEST = 3  # tokens of an answer, its end included
PROMPTS, GROUP = 32, 8  # of a step; answers to each


# ---- the task ------------------------------------------------------------------------------------------------------


def tokens_of(text: str) -> list[int]:
    return [LETTERS.index(letter) for letter in text]


def problems(step: int) -> list[tuple[str, str]]:
    """A step's prompts and their right answers."""
    draw = random.Random(step)
    pairs = [(draw.randrange(10), draw.randrange(10)) for _ in range(PROMPTS)]
    return [(f"{a}+{b}=", str(a + b)) for a, b in pairs]


def reward(answer: list[int], right: str) -> float:
    return float(answer == [*tokens_of(right), END])


# ---- vLLM ----------------------------------------------------------------------------------------------------------


class Server:
    """vLLM's server, kept alive by a thread of the script: outside of the run, whose processes end with it."""

    def __init__(self, python: Path, model: Path, log: Path) -> None:
        # Bound until the script ends, so that the kernel gives nobody else the port while no server runs. With this
        # option, which vLLM sets too, one that does not listen does not hinder one that does.
        self._reserved = socket.socket()
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._reserved.bind(("127.0.0.1", 0))
        self.port = self._reserved.getsockname()[1]
        options = "--tokens-only --skip-tokenizer-init --enforce-eager --no-enable-prefix-caching --host 127.0.0.1"
        sizes = f"--dtype float32 --max-model-len 16 --max-num-seqs {PROMPTS * GROUP} --port {self.port}"
        transfer = ["--generation-config", "vllm", "--weight-transfer-config", '{"backend": "rayzero"}']
        serve = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]  # `vllm serve`
        self._command = [*serve, *options.split(), *sizes.split(), *transfer]
        self._log, self._over = log, threading.Event()
        self._thread = threading.Thread(target=self._keep)
        self._thread.start()

    def _keep(self) -> None:
        environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
        with self._log.open("a") as log:
            while not self._over.is_set():
                server = subprocess.Popen(
                    self._command, stdout=log, stderr=log, env=os.environ | environment, start_new_session=True
                )
                print(f"vLLM starts as process {server.pid}", flush=True)
                while server.poll() is None and not self._over.wait(0.2):
                    pass
                if server.returncode is not None:
                    last = "\n".join(self._log.read_text().splitlines()[-20:])
                    print(f"vLLM's process {server.pid} has ended: {server.returncode}. Its log:\n{last}", flush=True)
                for how in (signal.SIGTERM, signal.SIGKILL):  # its workers, too, which remove their shared memory
                    with suppress(ProcessLookupError):
                        os.killpg(server.pid, how)
                        for _ in range(100):
                            server.poll()
                            os.killpg(server.pid, 0)  # until all have ended
                            time.sleep(0.1)

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self._reserved.close()


class Engine:
    """The server, as the run calls it."""

    def __init__(self, port: int, run: Path, config: Path) -> None:
        """run: the folder of the run whose weights it loads. config: transformers' of the model, for their names."""
        self._url, self._source = f"http://127.0.0.1:{port}", {"run": str(run), "config": str(config)}

    def call(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.loads(answer.read() or b"null")

    def take(self, version: int) -> None:
        """Load a version of the weights."""
        before = self.call("/weight_info")["weight_version"]
        if before == str(version):
            return
        if not before.isdigit():  # it has just started
            self.call("/init_weight_transfer_engine", {"init_info": self._source})
        with suppress(HTTPError):  # one is open if rank 0 died in it: go on with that
            self.call("/start_weight_update", {})
        self.call("/update_weights", {"update_info": {"version": version}})
        self.call("/finish_weight_update", {"weight_version": str(version)})

    def answers(self, prompt: list[int], seed: int) -> list[dict[str, Any]]:
        """A group of answers: tokens, the log-probability of each, and the version of the weights that made them."""
        sampling = {"n": GROUP, "max_tokens": LONGEST, "temperature": 1.0, "logprobs": 0, "seed": seed}
        body = {"token_ids": prompt, "sampling_params": {**sampling, "stop_token_ids": [END], "detokenize": False}}
        return [
            {
                "tokens": one["token_ids"],
                "logprobs": [each["logprob"] for each in one["logprobs"]["content"]],
                "versions": [int(span["version"]) for span in one["weight_versions"]],
            }
            for one in self.call("/inference/v1/generate", body)["choices"]
        ]


class Samples:
    """Each step's answers, in a file of the run: rank 0 has them made, all ranks read them. So a rank that dies finds
    those of the step that it repeats."""

    def __init__(self, run: Path, engine: Engine, conducts: bool) -> None:
        """conducts: this is rank 0."""
        self._folder, self._engine = run / "samples", engine
        self._folder.mkdir(exist_ok=True)
        self._threads = ThreadPoolExecutor(1 + 8) if conducts else None
        self._follower = rayzero.follow(run) if conducts else None
        self._making: Future[None] | None = None

    def begin(self, step: int, version: int) -> Future[None]:
        """Have a step's answers made with the newest weights, ``version`` or later, which are soon there. The future is
        done when the engine has them: they may be overwritten then."""
        taken: Future[None] = Future()
        if self._threads is None or self._path(step).exists():
            taken.set_result(None)
        else:
            self._making = self._threads.submit(self._make, step, version, taken)
            self._making.add_done_callback(lambda made: taken.done() or taken.set_exception(made.exception()))
        return taken

    def _make(self, step: int, version: int, taken: Future[None]) -> None:
        assert self._threads is not None
        assert self._follower is not None
        asked = problems(step)
        while True:
            version, began = self._follower.wait(version), time.perf_counter()
            try:
                self._engine.take(version)
                has_them = time.perf_counter()
                if not taken.done():
                    taken.set_result(None)
                groups = list(
                    self._threads.map(
                        lambda at: self._engine.answers(tokens_of(asked[at][0]), step * PROMPTS + at), range(PROMPTS)
                    )
                )
                break
            except (OSError, HTTPException) as error:  # it starts, or died, or the version is overwritten
                if isinstance(error, HTTPError):
                    print(f"vLLM, asked for {error.url}: {error} {error.read().decode()}", flush=True)
                    if error.code < 500:
                        raise
                time.sleep(0.5)
        for (_, right), group in zip(asked, groups, strict=True):
            for one in group:
                one["reward"] = reward(one["tokens"], right)
        seconds = {"update_s": has_them - began, "generate_s": time.perf_counter() - has_them}
        whole = self._path(step).with_suffix(".making")
        whole.write_text(json.dumps({"groups": groups, **seconds}))
        whole.rename(self._path(step))

    def of(self, step: int) -> dict[str, Any]:
        """A step's answers; waits until they are there."""
        while not self._path(step).exists():
            if self._making is not None and self._making.done():
                self._making.result()  # raises why it ended
            time.sleep(0.005)
        return json.loads(self._path(step).read_text())

    def _path(self, step: int) -> Path:
        return self._folder / f"{step:06d}.json"


# ---- losses --------------------------------------------------------------------------------------------------------


def rows(prompts: list[list[int]], answers: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Tokens (n, length), padded, and which of them but the first are of an answer (n, length - 1)."""
    length = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
    tokens, ours = torch.full((len(prompts), length), PAD), torch.zeros(len(prompts), length)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        end = len(prompt) + len(answer)
        tokens[row, :end] = torch.tensor(prompt + answer)
        ours[row, len(prompt) : end] = 1
    return tokens, ours[:, 1:]


def supervised_loss(model: Any, step: int, rank: int, ranks: int) -> Tensor:
    """Cross entropy of the right answers."""
    mine = problems(step)[rank::ranks]
    tokens, ours = rows([tokens_of(prompt) for prompt, _ in mine], [[*tokens_of(right), END] for _, right in mine])
    logits = model(input_ids=tokens[:, :-1]).logits.float()
    each = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    return (each * ours.flatten()).sum() / ours.sum()


def policy_loss(
    model: Any, step: int, groups: list[Any], rank: int, ranks: int, clip: float
) -> tuple[Tensor, dict[str, float]]:
    """GRPO's: the clipped gain of each token over the weights that made it, by the advantage of its answer in its
    group; the ranks' mean is that of all tokens. Also how far these weights are from those."""
    asked = [tokens_of(prompt) for prompt, _ in problems(step)]
    share = list(zip(asked, groups, strict=True))[rank::ranks]
    mine = [(prompt, one, group) for prompt, group in share for one in group]
    tokens, ours = rows([prompt for prompt, _, _ in mine], [one["tokens"] for _, one, _ in mine])
    made = torch.zeros(ours.shape)
    made[ours.bool()] = torch.tensor([each for _, one, _ in mine for each in one["logprobs"]])  # in the rows' order
    rewards = torch.tensor([[one["reward"] for one in group] for _, _, group in mine])
    own = torch.tensor([one["reward"] for _, one, _ in mine])
    advantage = (own - rewards.mean(1)) / (rewards.std(1, correction=0) + 1e-4)
    logits = model(input_ids=tokens[:, :-1]).logits.float()
    now = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    ratio = ((now - made) * ours).exp()
    gain = torch.minimum(ratio * advantage[:, None], ratio.clamp(1 - clip, 1 + clip) * advantage[:, None])
    count = sum(len(one["tokens"]) for group in groups for one in group)
    moved = (ratio.detach().log() * ours).abs()
    clipped = ((ratio.detach() - 1).abs() > clip).float().sum() / ours.sum()
    return -(gain * ours).sum() * ranks / count, {"log_ratio": float(moved.max()), "clipped": float(clipped)}


# ---- the run -------------------------------------------------------------------------------------------------------


def loop(config: dict[str, Any]) -> None:
    """The loop of every rank."""
    from transformers import AutoConfig, LlamaForCausalLM

    context = rayzero.get_context()
    assert context.run_dir is not None
    rank, ranks, warm = context.rank, context.world_size, config["warm_up"]
    torch.manual_seed(0)
    model = LlamaForCausalLM(AutoConfig.from_pretrained(config["model"]))
    model, optimizer = rayzero.prepare(model, torch.optim.AdamW(model.parameters(), weight_decay=0.0))
    rayzero.track()
    engine = Engine(config["port"], context.run_dir, Path(config["model"]) / "config.json")
    samples = Samples(context.run_dir, engine, rank == 0)
    for step in range(context.step, config["steps"]):
        began = time.perf_counter()
        taken, told = None, {}
        optimizer.param_groups[0]["lr"] = 1e-3 if step < warm else config["lr"]
        if step < warm:
            loss = supervised_loss(model, step, rank, ranks)
        else:
            if config["release"]:
                rayzero.release(model)  # the ranks hold almost nothing while they wait
            if not config["ahead"] or step == warm:
                samples.begin(step, step).result()
            batch = samples.of(step)
            waited = time.perf_counter() - began
            if config["ahead"] and step + 1 < config["steps"]:
                taken = samples.begin(step + 1, step)
            loss, told = policy_loss(model, step, batch["groups"], rank, ranks, config["clip"])
            every = [one for group in batch["groups"] for one in group]
            told |= {key: batch[key] for key in ("update_s", "generate_s")} | {
                "reward": sum(one["reward"] for one in every) / len(every),
                "version": min(version for one in every for version in one["versions"]),
                "wait_s": waited,
            }
        loss.backward()
        optimizer.clip_grad_norm_(1.0)
        if taken is not None:
            taken.result()  # the step leads to other weights
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            rayzero.report({"loss": loss.item(), **told, "step_s": time.perf_counter() - began})


def show(report: Any) -> None:
    """Print a report of rank 0."""
    if "reward" in report.metrics and report.step % 5 == 0:
        told = report.metrics
        print(
            f"step {report.step:3d}  reward {told['reward']:.3f}  of v{told['version']}  "
            f"generation {told['generate_s']:.2f} s  step {told['step_s']:.2f} s",
            flush=True,
        )


@contextmanager
def folder_of(storage: Path | None) -> Iterator[Path]:
    """``storage``, or one for this time."""
    if storage is not None:
        storage.mkdir(parents=True, exist_ok=True)
        yield storage.resolve()
        return
    with tempfile.TemporaryDirectory() as made:
        yield Path(made)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path, default=ROOT / ".venv-vllm/bin/python", help="the Python that has vLLM")
    parser.add_argument("--ahead", action="store_true", help="generate the next batch while this one trains")
    parser.add_argument("--release", action="store_true", help="ranks give their memory back while vLLM generates")
    parser.add_argument("--warm-up", type=int, default=60, help="supervised steps")
    parser.add_argument("--steps", type=int, default=200, help="with those")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--optimizers", type=int, default=1)
    parser.add_argument("--lr", type=float, default=3e-4, help="of reinforcement; supervised steps take 1e-3")
    parser.add_argument("--storage", type=Path, help="where the run's folder, grpo, is made; otherwise it is not kept")
    args = parser.parse_args()
    if not args.vllm.exists():
        parser.error(f"there is no {args.vllm}: run scripts/vllm first")

    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    tokens = {"vocab_size": END + 1, "pad_token_id": PAD, "eos_token_id": END, "bos_token_id": PAD}
    with folder_of(args.storage) as folder:
        LlamaForCausalLM(LlamaConfig(**shape, **tokens, max_position_embeddings=32)).save_pretrained(folder / "model")
        server = Server(args.vllm, folder / "model", folder / "vllm.log")
        chosen = {"steps": args.steps, "warm_up": args.warm_up, "lr": args.lr, "clip": 0.2}
        chosen |= {"ahead": args.ahead, "release": args.release}
        try:
            result = rayzero.ZeroTrainer(
                loop,
                train_loop_config={"model": folder / "model", "port": server.port, **chosen},
                scaling_config=rayzero.ScalingConfig(
                    num_workers=args.workers, num_optimizers=args.optimizers, threads_per_worker=1
                ),
                run_config=rayzero.RunConfig(name="grpo", storage_path=str(folder), max_failures=9),
                on_report=show,
            ).fit()
        finally:
            server.close()
    print(f"reward of the last batch: {result.metrics['reward']:.3f}")


if __name__ == "__main__":
    main()
