"""Frozen quantized bases with trained adapters: bitsandbytes, torchao, hqq, quanto; PEFT's QLoRA saved and resumed."""

from __future__ import annotations

import copy
import importlib
import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import rayzero
from rayzero import ZeroConfig
from rayzero.engine.context import RankContext, running_in
from rayzero.engine.prepare import COMPUTE_DTYPES, plan_units
from rayzero.errors import RayZeroError
from rayzero.testing import run_ranks

from .trial import NOT_TRIED, REFUSED, ROUNDING, SAME, WRONG, Case, Outcome

TITLE = "Quantized bases that were tried"
INTRO = """
Adapters over a frozen quantized base, trained with RayZero beside plain PyTorch on the CPU. *same* means that all
losses and all trained weights have equal bits, where plain PyTorch keeps fp32 masters of what computes in fewer bits.
Units come and go, cut over two owners; with several ranks, plain PyTorch averages their gradients. The Trainer's cases
save an adapter, and once more after a resume from a checkpoint in the middle.

`scripts/sweep quantized` needs the packages below, which `scripts/setup` does not install:
`.venv/bin/pip install --no-deps bitsandbytes torchao peft hqq optimum-quanto termcolor`.
"""
PACKAGES = ["torch", "bitsandbytes", "torchao", "peft", "transformers", "hqq", "optimum-quanto"]

WIDTH, DEPTH, STEPS = 128, 4, 3
STORAGES = [torch.uint8, torch.bfloat16, torch.float16, torch.float32]


def cases() -> Iterator[Case]:
    """Every quantization by itself, then PEFT's adapters over 4 bits, then its QLoRA in transformers' Trainer."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    for name in ("bitsandbytes", "transformers", "peft", "torchao.quantization", "hqq.core.quantize"):
        importlib.import_module(name)  # once, not in every process
    yield from _bitsandbytes()
    yield from _torchao()
    yield from _others()
    yield from _peft()
    yield from _trainer()


# ---- a layer, its training


class _Adapted(nn.Module):
    """A quantized linear layer and an adapter of rank 4."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(4, WIDTH) / 8)
        self.up = nn.Parameter(torch.zeros(WIDTH, 4))

    def forward(self, x: Tensor) -> Tensor:
        added = nn.functional.linear(nn.functional.linear(x, self.down), self.up)
        return x + torch.tanh(self.base(x) + added)


def _layers(make: Callable[[nn.Linear], nn.Module]) -> nn.Module:
    """A model of layers that ``make`` makes of linear ones."""
    torch.manual_seed(0)
    return nn.Sequential(*(_Adapted(make(nn.Linear(WIDTH, WIDTH)).requires_grad_(False)) for _ in range(DEPTH)))


def _batch(step: int, rank: int = 0) -> Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def _loss(model: nn.Module, step: int, rank: int, dtype: torch.dtype) -> Tensor:
    return model(_batch(step, rank).to(dtype)).float().square().mean()


def _plain(
    build: Callable[[], nn.Module], dtype: torch.dtype, ranks: int
) -> tuple[list[list[float]], dict[str, Tensor]]:
    """Losses by rank, and the masters after the last step. Every rank has a model, as with DDP."""
    models = [build() for _ in range(ranks)]
    trained = [{n: p for n, p in model.named_parameters() if p.requires_grad} for model in models]
    masters = {name: nn.Parameter(param.detach().float().clone()) for name, param in trained[0].items()}
    optimizer = torch.optim.AdamW(masters.values(), lr=1e-2, fused=True)
    for param in (param for model in models for param in model.parameters()):
        if type(param) is nn.Parameter and param.dtype is torch.float32:
            param.data = param.data.to(dtype)
    losses: list[list[float]] = [[] for _ in models]
    for step in range(STEPS):
        for rank, model in enumerate(models):
            loss = _loss(model, step, rank, dtype)
            loss.backward()
            losses[rank].append(loss.item())
        for name, master in masters.items():
            grads = [params[name].grad for params in trained]
            if grads[0] is not None:
                master.grad = sum((grad.float() for grad in grads[1:]), start=grads[0].float()) * (1 / ranks)
        optimizer.step()
        for params in trained:
            for name, param in params.items():
                param.grad = None
                param.data.copy_(masters[name].data)
    return losses, {name: master.detach() for name, master in masters.items()}


def _of_rank(context: RankContext, model: nn.Module) -> tuple[list[float], dict[str, Tensor]]:
    trained = [param for param in model.parameters() if param.requires_grad]
    model, optimizer = rayzero.prepare(model, torch.optim.AdamW(trained, lr=1e-2))
    losses = []
    for step in range(STEPS):
        loss = _loss(model, step, context.rank, torch.float32)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, rayzero.full_state_dict(model)


def _config(model: nn.Module, precision: Any) -> ZeroConfig:
    """Units come and go: there is not room for all."""
    config = ZeroConfig(precision=precision, shard_bytes=2048, async_prefetch=False)
    sizes = [unit.size_bytes for unit in plan_units(model, config).layout.units]
    return config.replace(gpu_param_memory_budget=max(sum(sizes) - 512, 3 * (max(sizes) + 512)))


def _compare(build: Callable[[], nn.Module], precision: str = "fp32", ranks: int = 1) -> Outcome:
    try:
        losses, expected = _plain(build, COMPUTE_DTYPES[precision], ranks)
    except Exception as exc:
        return Outcome(NOT_TRIED, f"plain PyTorch: {type(exc).__name__}: {exc}")
    try:
        models = [build() for _ in range(ranks)]  # not in the ranks, which share a generator
        config = _config(models[0], precision)
        found = run_ranks(lambda context: _of_rank(context, models[context.rank]), ranks, 2, "shm", config=config)
    except RayZeroError as exc:
        return Outcome(REFUSED, str(exc))
    if [ours for ours, _ in found] != losses:
        return Outcome(WRONG, f"losses {found[0][0]}, plain {losses[0]}")
    return _judged(found[0][1], expected)


def _judged(state: dict[str, Tensor], expected: dict[str, Tensor]) -> Outcome:
    if all(torch.equal(state[name], value) for name, value in expected.items()):
        return Outcome(SAME)
    off = max(float((state[name].float() - value.float()).abs().max()) for name, value in expected.items())
    return Outcome(ROUNDING if off < 1e-6 else WRONG, f"trained weights differ by {off:.2g}")


# ---- quantizations


def _bitsandbytes() -> Iterator[Case]:
    for precision in COMPUTE_DTYPES:
        for storage in STORAGES:
            for kind in ("nf4", "fp4"):
                build = partial(_layers, partial(_four_bits, storage=storage, kind=kind))
                name = f"bitsandbytes Linear4bit {kind} in {str(storage)[6:]}, {precision}"
                yield Case(name, partial(_compare, build, precision))
        for threshold in (0.0, 6.0):
            build = partial(_layers, partial(_eight_bits, threshold=threshold))
            yield Case(
                f"bitsandbytes Linear8bitLt threshold {threshold:g}, {precision}", partial(_compare, build, precision)
            )
        for kind in ("Embedding4bit", "Embedding8bit"):
            yield Case(f"bitsandbytes {kind}, {precision}", partial(_compare, partial(_embeds, kind), precision))
    for storage in STORAGES:
        build = partial(_layers, partial(_four_bits, storage=storage, kind="nf4"))
        name = f"bitsandbytes Linear4bit nf4 in {str(storage)[6:]}, bf16, 3 ranks"
        yield Case(name, partial(_compare, build, "bf16", 3))


def _four_bits(linear: nn.Linear, storage: torch.dtype, kind: str) -> nn.Module:
    import bitsandbytes as bnb

    nested = kind == "nf4"
    made = bnb.nn.Linear4bit(WIDTH, WIDTH, quant_type=kind, quant_storage=storage, compress_statistics=nested)
    made.load_state_dict(linear.state_dict())
    return made.to("cpu")


def _eight_bits(linear: nn.Linear, threshold: float) -> nn.Module:
    import bitsandbytes as bnb

    made = bnb.nn.Linear8bitLt(WIDTH, WIDTH, has_fp16_weights=False, threshold=threshold)
    made.load_state_dict(linear.state_dict())
    return made.to("cpu")


class _Embeds(nn.Module):
    """Rows of a quantized table, chosen by what comes in, and a trained layer."""

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table, self.layer = table, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(self.table(x.argmax(dim=1)).to(x.dtype))


def _embeds(kind: str) -> nn.Module:
    import bitsandbytes as bnb

    torch.manual_seed(0)
    tables = [getattr(bnb.nn, kind)(WIDTH, WIDTH).to("cpu") for _ in range(DEPTH)]
    return nn.Sequential(*(_Embeds(table) for table in tables))


def _torchao() -> Iterator[Case]:
    for name in (
        "Int8WeightOnly",
        "Int4WeightOnly",
        "IntxWeightOnly",
        "Float8WeightOnly",
        "Int8DynamicActivationInt8Weight",
    ):
        yield Case(
            f"torchao {name}Config", partial(_compare, partial(_layers, partial(_quantized_by_torchao, name=name)))
        )


def _quantized_by_torchao(linear: nn.Linear, name: str) -> nn.Module:
    from torchao import quantization

    held = nn.Sequential(linear)
    quantization.quantize_(held, getattr(quantization, f"{name}Config")())
    return held


def _others() -> Iterator[Case]:
    for bits in (8, 4, 2):
        for precision in COMPUTE_DTYPES:
            build = partial(_layers, partial(_hqq, bits=bits, dtype=COMPUTE_DTYPES[precision], floats=False))
            yield Case(f"hqq {bits} bits, {precision}", partial(_compare, build, precision))
    for precision in COMPUTE_DTYPES:
        build = partial(_layers, partial(_hqq, bits=4, dtype=COMPUTE_DTYPES[precision], floats=True))
        yield Case(f"hqq 4 bits viewed as floats, {precision}", partial(_compare, build, precision))
    for kind in ("qint8", "qint4", "qfloat8"):
        yield Case(f"quanto {kind}", partial(_compare, partial(_layers, partial(_quanto, kind=kind))))


def _hqq(linear: nn.Linear, bits: int, dtype: torch.dtype, floats: bool) -> nn.Module:
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear

    config = BaseQuantizeConfig(nbits=bits, group_size=64, view_as_float=floats)
    return HQQLinear(copy.deepcopy(linear), config, compute_dtype=dtype, device="cpu")


def _quanto(linear: nn.Linear, kind: str) -> nn.Module:
    from optimum import quanto

    held = nn.Sequential(linear)
    quanto.quantize(held, weights=getattr(quanto, kind))
    quanto.freeze(held)
    return held


# ---- PEFT


def _peft() -> Iterator[Case]:
    settings: dict[str, dict[str, Any]] = {
        "LoRA": {},
        "LoRA of rank-stabilised scale": {"use_rslora": True},
        "LoRA with dropout 0 and trained biases": {"bias": "lora_only"},
        "DoRA": {"use_dora": True},
        "AdaLoRA": {"kind": "AdaLoraConfig", "total_step": 10},
        "IA3": {"kind": "IA3Config", "feedforward_modules": []},
        "VeRA": {"kind": "VeraConfig"},
        "RandLoRA": {"kind": "RandLoraConfig"},
        "OFT": {"kind": "OFTConfig", "oft_block_size": 8, "r": 0},
        "RoAd": {"kind": "RoadConfig"},
    }
    for bits in (4, 8):
        for name, chosen in settings.items():
            yield Case(f"PEFT {name} over {bits} bits", partial(_compare, partial(_adapted, bits, **chosen)))


class _Stack(nn.Module):
    """Layers with residuals, as PEFT finds them by name."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


class _Layer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x)
        return found


def _adapted(bits: int, kind: str = "LoraConfig", **settings: Any) -> nn.Module:
    import peft

    torch.manual_seed(0)
    make = partial(_four_bits, storage=torch.uint8, kind="nf4") if bits == 4 else partial(_eight_bits, threshold=0.0)
    model: Any = _Stack([_Layer(make(nn.Linear(WIDTH, WIDTH))) for _ in range(DEPTH)]).requires_grad_(False)
    model.is_loaded_in_4bit, model.is_loaded_in_8bit = bits == 4, bits == 8
    return peft.get_peft_model(model, getattr(peft, kind)(target_modules=["inner"], **settings))


# ---- transformers' Trainer: train, save, resume


def _trainer() -> Iterator[Case]:
    for storage in STORAGES:
        for dtype in (torch.bfloat16, torch.float32):
            name = f"QLoRA in transformers' Trainer, nf4 in {str(storage)[6:]}, model in {str(dtype)[6:]}"
            yield Case(name, partial(_qlora, storage, dtype, kbit=False))
    yield Case(
        "QLoRA in transformers' Trainer, prepare_model_for_kbit_training", partial(_qlora, torch.uint8, None, kbit=True)
    )


class _Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = torch.randint(0, 96, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": row, "labels": row}


def _qlora(storage: torch.dtype, dtype: torch.dtype | None, *, kbit: bool) -> Outcome:
    """Four steps; and two steps, a checkpoint, and two steps of a process that resumes from it."""
    import transformers
    from safetensors.torch import load_file

    from rayzero.integrations.transformers import Trainer

    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        torch.manual_seed(0)
        small = transformers.LlamaConfig(
            hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4, vocab_size=96
        )
        transformers.LlamaForCausalLM(small).save_pretrained(root / "base")
        build = partial(_quantized_llama, root / "base", storage, dtype or torch.bfloat16, kbit)
        plain = transformers.Trainer(model=build(), train_dataset=_Rows(), args=_arguments(root / "plain"))
        plain.train()
        plain.save_model(str(root / "plain"))
        low = dtype is torch.bfloat16
        config = ZeroConfig(precision="bf16" if low else "fp32", keep_fp32=("*lora_*",) if low else ())
        losses, adapters = [], []
        try:
            for resume in (None, root / "ours" / "checkpoint-2"):
                with running_in(RankContext()):
                    ours = Trainer(
                        model=build(), train_dataset=_Rows(), args=_arguments(root / "ours"), zero_config=config
                    )
                    ours.train(resume_from_checkpoint=None if resume is None else str(resume))
                    ours.save_model(str(root / "saved"))
                    losses.append(_losses(ours))
                    adapters.append(load_file(root / "saved" / "adapter_model.safetensors"))
        except RayZeroError as exc:
            return Outcome(REFUSED, str(exc))
        if losses != [_losses(plain)] * 2:
            return Outcome(WRONG, f"losses {losses}, plain {_losses(plain)}")
        expected = load_file(root / "plain" / "adapter_model.safetensors")
        outcomes = [_judged(found, expected) for found in adapters]
        return next((outcome for outcome in outcomes if outcome.kind != SAME), outcomes[0])


def _quantized_llama(base: Path, storage: torch.dtype, dtype: torch.dtype, kbit: bool) -> Any:
    import peft
    import transformers

    bits = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_quant_storage=storage,
        bnb_4bit_compute_dtype=dtype,
    )
    model: Any = transformers.LlamaForCausalLM.from_pretrained(
        base, quantization_config=bits, dtype=dtype, device_map={"": "cpu"}
    )
    if kbit:
        again = {"use_reentrant": False}
        model = peft.prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs=again)
    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))


def _arguments(folder: Path) -> Any:
    import transformers

    return transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=4,
        save_steps=2,
        logging_steps=1,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        optim="adamw_torch_fused",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )


def _losses(trainer: Any) -> list[float]:
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]
