"""TRL's trainers on RayZero beside themselves: one rank beside one process, two ranks beside DDP on gloo.

`python -m lab.sweeps.trl CASE SIDE FILE` is a part of a case of two ranks: SIDE is "ours", or the index of a
process of DDP. It saves what it has trained in FILE."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .trial import REFUSED, ROUNDING, SAME, WRONG, Case, Outcome

TITLE = "TRL's trainers that were tried"
INTRO = """
Each trainer does three steps of AdamW, with its own defaults but for bf16, on a tiny Llama and a tokenizer that are
made here: as `class Mine(ZeroTraining, DPOTrainer)` on RayZero, and as it is. On one rank, weights and logged losses
must have the same bits; norms are not clipped there, because the scale is computed in fp64 here. Two ranks clip, and
are compared with two processes under DistributedDataParallel on gloo, whose sums are in another order. "Adapter" is a
LoRA adapter of PEFT that existed before, so that the trainer compares with a frozen copy of it.
"""
SECONDS = 600.0  # for a case: two ranks are five processes that import TRL
PACKAGES = ["trl", "transformers", "peft", "accelerate", "torch"]

Trained = tuple[dict[str, torch.Tensor], list[float]]  # weights; logged losses

STEPS = 3
_ROUNDING = 2e-4  # of a tensor's largest value; losses: relative
_WORDS = ["red", "green", "blue", "tall", "small", "old", "new", "cat", "dog", "sun", "sea", "one", "two", "three"]
_TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}"


def cases() -> list[Case]:
    """Every trainer on one rank and on two."""
    names = list(_KINDS)
    return [
        Case(f"{name}, {world} rank{'s' * (world > 1)}", partial(_case, name, world))
        for world in (1, 2)
        for name in names
    ]


def _case(name: str, world: int) -> Outcome:
    from rayzero.errors import RayZeroError

    try:
        with tempfile.TemporaryDirectory() as folder:
            ours, plain = (_alone if world == 1 else _together)(name, Path(folder))
    except RayZeroError as error:
        return Outcome(REFUSED, str(error))
    return _compared(ours, plain, exact=world == 1)


def _compared(ours: Trained, plain: Trained, *, exact: bool) -> Outcome:
    weights, losses = ours
    theirs, logged = plain
    missing = sorted(weights.keys() ^ theirs.keys())
    if missing:
        return Outcome(WRONG, f"weights on one side alone: {', '.join(missing[:3])}")
    if all(torch.equal(weights[name], theirs[name]) for name in theirs) and losses == logged:
        return Outcome(SAME)
    worst = max(float((weights[n] - theirs[n]).abs().max() / theirs[n].abs().max().clamp_min(1e-30)) for n in theirs)
    apart = max(abs(a - b) / max(abs(b), 1e-30) for a, b in zip(losses, logged, strict=True))
    said = f"weights differ by {worst:.1e} of a tensor's largest value, losses by {apart:.1e}"
    return Outcome(WRONG if exact or max(worst, apart) > _ROUNDING else ROUNDING, said)


# ---- what is trained --------------------------------------------------------------------------------------------


def _tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *_WORDS])}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )
    made.chat_template = _TEMPLATE
    return made


def _model(*, adapter: bool, reward: bool) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(_WORDS) + 3,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
        num_labels=1,
    )
    model = (LlamaForSequenceClassification if reward else LlamaForCausalLM)(config)
    if not adapter:
        return model
    from peft import LoraConfig, get_peft_model

    task = "SEQ_CLS" if reward else "CAUSAL_LM"
    return get_peft_model(model, LoraConfig(r=2, lora_alpha=8, init_lora_weights=False, task_type=task))


def _rows(columns: Callable[[Callable[[int], str], int], dict[str, Any]]) -> Any:
    """24 examples of random words, of different lengths."""
    from datasets import Dataset

    draw = torch.Generator().manual_seed(0)

    def words(most: int) -> str:
        count = int(torch.randint(2, most, (1,), generator=draw))
        return " ".join(_WORDS[int(i)] for i in torch.randint(0, len(_WORDS), (count,), generator=draw))

    return Dataset.from_list([columns(words, i) for i in range(24)])


def _text(words: Any, i: int) -> dict[str, Any]:
    return {"text": words(12)}


def _pair(words: Any, i: int) -> dict[str, Any]:
    return {"prompt": words(6) + " ", "chosen": words(9), "rejected": words(9)}


def _judged(words: Any, i: int) -> dict[str, Any]:
    return {"prompt": words(6) + " ", "completion": words(9), "label": i % 2 == 0}


def _prompt(words: Any, i: int) -> dict[str, Any]:
    return {"prompt": words(6)}


def _few_distinct(completions: list[str], **_: Any) -> list[float]:
    return [len(set(text.split())) / 8 - 0.05 * len(text.split()) for text in completions]


_GENERATES = {"num_generations": 2, "max_completion_length": 6, "beta": 0.1}
_KINDS: dict[str, tuple[str, Any, dict[str, Any], dict[str, Any]]] = {  # trainer, data, settings, model
    "SFT": ("SFT", _text, {}, {}),
    "SFT, adapter": ("SFT", _text, {}, {"adapter": True}),
    "Reward": ("Reward", _pair, {}, {"reward": True}),
    "DPO": ("DPO", _pair, {}, {}),
    "DPO, adapter": ("DPO", _pair, {}, {"adapter": True}),
    "DPO, adapter, accumulation": ("DPO", _pair, {"gradient_accumulation_steps": 2}, {"adapter": True}),
    "KTO": ("KTO", _judged, {}, {}),
    "KTO, adapter": ("KTO", _judged, {}, {"adapter": True}),
    "GRPO": ("GRPO", _prompt, _GENERATES | {"beta": 0.0}, {}),
    "GRPO, adapter": ("GRPO", _prompt, _GENERATES, {"adapter": True}),
    "RLOO, adapter": ("RLOO", _prompt, _GENERATES, {"adapter": True}),
}


def _trainer(name: str, folder: Path, *, ours: bool, clipped: bool) -> Any:
    import trl

    from rayzero.integrations.transformers import ZeroTraining

    kind, data, settings, model = _KINDS[name]
    base = getattr(trl, f"{kind}Trainer")
    cls = type("Mine", (ZeroTraining, base), {}) if ours else base
    args = getattr(trl, f"{kind}Config")(
        output_dir=str(folder / "out"),
        per_device_train_batch_size=4,
        max_steps=STEPS,
        learning_rate=1e-3,
        max_grad_norm=1.0 if clipped else 0.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        dataloader_pin_memory=False,
        **settings,
    )
    more: dict[str, Any] = {"reward_funcs": _few_distinct} if kind in ("GRPO", "RLOO") else {}
    if kind in ("DPO", "KTO") and not model:
        more["ref_model"] = _model(adapter=False, reward=False)  # else loaded again, by its name
    return cls(
        model=_model(**{"adapter": False, "reward": False} | model),
        args=args,
        train_dataset=_rows(data),
        processing_class=_tokenizer(),
        **more,
    )


def _trained(trainer: Any) -> Trained:
    from rayzero import full_state_dict
    from rayzero.engine.prepare import is_prepared

    trainer.train()
    model = trainer.model
    weights = full_state_dict(model) if is_prepared(model) else model.state_dict()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {name: value.detach().clone() for name, value in weights.items()}, losses


# ---- one rank, and several --------------------------------------------------------------------------------------


def _alone(name: str, folder: Path) -> tuple[Trained, Trained]:
    ours, plain = (_trained(_trainer(name, folder, ours=side, clipped=False)) for side in (True, False))
    return ours, plain


def _together(name: str, folder: Path) -> tuple[Trained, Trained]:
    found = []
    for sides in (["ours"], ["0", "1"]):
        files = [folder / side for side in sides]
        world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_port())}
        parts = [
            subprocess.Popen(
                [sys.executable, "-m", __name__, name, side, str(file)],
                stdin=subprocess.PIPE,
                env=os.environ | (world | {"RANK": side, "LOCAL_RANK": side} if side != "ours" else {}),
            )
            for side, file in zip(sides, files, strict=True)
        ]
        for part in parts:
            part.wait()
        what = torch.load(files[0], weights_only=False)
        if isinstance(what, BaseException):
            raise what
        found.append(what)
    return found[0], found[1]


def _port() -> int:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _rank(context: Any, name: str) -> Trained:
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(dir=context.run_dir))
    if _KINDS[name][0] in ("GRPO", "RLOO"):  # they gather texts: docs/howto/trl.md
        os.environ |= {"RANK": str(context.rank), "LOCAL_RANK": str(context.rank)}
        os.environ |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{context.run_dir}/group", rank=context.rank, world_size=2
        )
    return _trained(_trainer(name, folder, ours=True, clipped=True))


def _part(name: str, side: str, file: Path) -> None:
    """A part of a case of two ranks; see the module."""
    from rayzero.testing import run_ranks

    threading.Thread(target=_end_with_the_case, daemon=True).start()
    try:
        if side == "ours":
            loop = partial(_rank, name=name)
            found: Any = run_ranks(loop, 2, 2, "grpc", processes=True, run_dir=file.parent)
            _same_on_both(found)
            found = found[0]
        else:
            found = _trained(_trainer(name, file.parent, ours=False, clipped=True))
    except BaseException as error:
        torch.save(error, file)
        raise
    torch.save(found, file)


def _end_with_the_case() -> None:
    """The case holds the other end of stdin, and may be killed."""
    sys.stdin.read()
    os._exit(1)


def _same_on_both(ranks: list[Trained]) -> None:
    one, other = (weights for weights, _ in ranks)
    if not all(torch.equal(one[name], other[name]) for name in one):
        raise AssertionError("ranks have different weights")


if __name__ == "__main__":
    _part(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
