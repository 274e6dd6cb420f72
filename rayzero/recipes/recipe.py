"""The recipe: every setting of ``rayzero train``, checked when it is created."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, Strict, field_validator, model_validator

from rayzero.config import (
    ConfigModel,
    Count,
    Flag,
    Natural,
    Positive,
    RunConfig,
    ScalingConfig,
    Share,
    Size,
    ZeroConfig,
    apply_overrides,
    read_yaml,
)
from rayzero.errors import ConfigError

GPT = "gpt"
HF_PREFIX = "hf:"
STREAM_PREFIX = "datasets:"

_Factor = Annotated[float, Strict(), Field(ge=0, lt=1)]

_GROUPS = ("zero", "scaling", "run")

# Settings that may also be written without their group's name.
_SHORT_FORMS = {"precision": "zero", "gradient_accumulation_steps": "zero"}


def in_groups(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The same settings: short forms in their groups, and no group that is null, as one without settings is in YAML.
    Raises ValueError if a group is anything else than settings."""
    grouped = {name: value for name, value in settings.items() if value is not None or name not in _GROUPS}
    for group in _GROUPS:
        value = grouped.get(group, {})
        if not isinstance(value, Mapping | ConfigModel):
            raise ValueError(f"{group} must be a group of settings ({group}.name=value), got {value!r}")
    for name, group in _SHORT_FORMS.items():
        if name in grouped:
            inner = grouped.get(group, {})
            inner = inner.model_dump() if isinstance(inner, ConfigModel) else dict(inner)
            grouped[group] = inner | {name: grouped.pop(name)}
    return grouped


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTConfig:
    """The shape of a :class:`~rayzero.recipes.model.GPT`."""

    vocab_size: int
    seq_len: int  # longest input, in tokens
    num_layers: int
    num_heads: int
    dim: int
    tie_embeddings: bool = False  # the head's weight is the embedding's

    def __post_init__(self) -> None:
        for name in ("vocab_size", "seq_len", "num_layers", "num_heads", "dim"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be >= 1, got {getattr(self, name)}")
        if self.dim % self.num_heads or (self.dim // self.num_heads) % 2:
            raise ConfigError(
                f"dim {self.dim} must split into {self.num_heads} heads of an even size (rotary positions turn pairs)"
            )


class RecipeConfig(ConfigModel):
    """A causal language model, its text, its schedule, and the run that trains it."""

    model: str = GPT
    """"gpt": our own, shaped by the next four settings; "hf:<config.json>": a transformers model, random weights."""

    init_from: str | None = None
    """Start from these weights: a safetensors file, a Hugging Face directory, or a checkpoint of RayZero, torch DCP or
    DeepSpeed; null: random ones from ``seed``."""

    num_layers: Annotated[Count, Field(le=10_000)] = 4
    """Blocks of the "gpt" model."""

    num_heads: Count = 4
    """Attention heads of the "gpt" model."""

    dim: Annotated[Count, Field(le=1 << 20)] = 256
    """Width of the "gpt" model."""

    tie_embeddings: Flag = False
    """True: the "gpt" model's head shares the embedding's weight."""

    seq_len: Count = 128
    """Tokens in a sequence."""

    batch_size: Count = 8
    """Sequences of one rank in one micro-batch."""

    steps: Count = 200
    """Optimizer steps of the whole run; the learning rate's schedule ends there."""

    optimizer: Literal["adamw", "muon"] = "adamw"
    """AdamW; or Muon for the matrices of blocks, with updates of AdamW's size, and AdamW for all other parameters."""

    lr: Positive = 1e-3
    """Highest learning rate."""

    warmup: Share = 0.2
    """Share of the steps over which the learning rate rises."""

    min_lr_ratio: Share = 0.1
    """Learning rate at the end of the cosine, as a share of ``lr``."""

    weight_decay: Annotated[float, Strict(), Field(ge=0, allow_inf_nan=False)] = 0.1
    """Decay of matrices; vectors (norms, biases) are not decayed."""

    betas: tuple[_Factor, _Factor] = (0.9, 0.95)
    """AdamW's averaging factors."""

    clip: Positive | None = 1.0
    """Clip the global gradient norm to this, as ``zero.max_grad_norm`` does; null: what that says."""

    eval_every: Count = 20
    """Steps between validations; the last step is always validated."""

    eval_batches: Count = 8
    """Batches of ``batch_size`` sequences in a validation, spread evenly over the validation text."""

    data: tuple[str, ...] = ("stdlib",)
    """Text (files, folders, globs, or "stdlib" for the Python standard library's sources), .jsonl files of chats or
    texts, a .npy file of tokens, or "datasets:<name or folder>[:<split>]" for a stream. docs/recipes.md has each."""

    max_data_bytes: Size | None = None
    """Read no more text than this; null: all of it."""

    validation_fraction: Annotated[float, Strict(), Field(gt=0, lt=1)] = 0.1
    """Share of the text that is kept for validation."""

    split: Literal["auto", "files", "tail"] = "auto"
    """How: whole files by the hash of their content, or the text's tail; "auto": files from 20 files on."""

    tokenizer: str = "bytes"
    """"bytes", or the path of a tokenizer.json or of a tokenizer's folder with its chat template (extra hf)."""

    train_on: Literal["answers", "all"] = "answers"
    """What is learned of chats and completions: the assistant's answers, or everything."""

    packing: Flag = True
    """True: several chats or texts share a row of ``seq_len`` tokens; transformers models see each of them alone."""

    sample_tokens: Natural = 64
    """Tokens that the trained model writes after each prompt when the run ends; 0: none."""

    sample_prompts: tuple[str, ...] = ()
    """What it goes on from; empty: pieces of the validation data."""

    sample_temperature: Annotated[float, Strict(), Field(ge=0, le=10)] = 0.7
    """How freely it draws tokens; 0: always the likeliest one."""

    export: Flag = False
    """True: at the end, write the folder model/ in the run's folder; transformers' from_pretrained reads it."""

    seed: Annotated[int, Strict(), Field(ge=0, lt=1 << 64)] = 0
    """Seed of the initial weights, unless ``init_from`` has them, and of the batches."""

    zero: ZeroConfig = ZeroConfig()
    """How states are split and moved; ``precision`` and ``gradient_accumulation_steps`` need no ``zero.`` before."""

    scaling: ScalingConfig = ScalingConfig()
    """How many processes."""

    run: RunConfig = RunConfig()
    """Folder of the run's files, checkpoints, resume."""

    @model_validator(mode="before")
    @classmethod
    def _short_forms(cls, settings: Any) -> Any:
        return in_groups(settings) if isinstance(settings, Mapping) else settings

    @field_validator("data", mode="before")
    @classmethod
    def _sources(cls, value: object) -> object:
        sources = (value,) if isinstance(value, str | Path) else value
        if not isinstance(sources, list | tuple) or not sources or not all(str(source) for source in sources):
            raise ValueError("must be a file, folder, glob or 'stdlib', or a list of them")
        return tuple(str(source) for source in sources)

    @field_validator("model")
    @classmethod
    def _known_model(cls, value: str) -> str:
        if value != GPT and not value.startswith(HF_PREFIX):
            raise ValueError("must be 'gpt' or 'hf:<config.json>'")
        return value

    @model_validator(mode="after")
    def _settings_agree(self) -> RecipeConfig:
        if self.model == GPT:
            self.gpt(vocab_size=1)
        clips = {self.clip, self.zero.max_grad_norm} - {None}
        if self.optimizer != "muon" and self.zero.matrix_updates == "rank":
            raise ValueError("zero.matrix_updates='rank' is for optimizer='muon'")
        if self.optimizer == "muon" and self.zero.moments != "fp32":
            raise ValueError(f"zero.moments is {self.zero.moments!r}, but optimizer=muon keeps its states in fp32")
        if len(clips) > 1:
            raise ValueError(
                f"clip is {self.clip} and zero.max_grad_norm is {self.zero.max_grad_norm}; set one of them"
            )
        return self

    @property
    def zero_config(self) -> ZeroConfig:
        """``zero``, with ``clip``."""
        return self.zero if self.clip is None else self.zero.replace(max_grad_norm=self.clip)

    def gpt(self, vocab_size: int) -> GPTConfig:
        """The shape of the "gpt" model."""
        shape = ("seq_len", "num_layers", "num_heads", "dim", "tie_embeddings")
        return GPTConfig(vocab_size=vocab_size, **{name: getattr(self, name) for name in shape})

    @property
    def tokens_per_step(self) -> int:
        """Tokens all ranks together train on in one step."""
        return self.seq_len * self.batch_size * self.zero.gradient_accumulation_steps * self.scaling.num_workers

    def at(self, directory: Path) -> RecipeConfig:
        """The same recipe with its data and tokenizer paths made absolute, so that any process may read them."""
        return self.replace(
            data=tuple(_absolute_source(source, directory) for source in self.data),
            tokenizer=self.tokenizer if self.tokenizer == "bytes" else str(directory / self.tokenizer),
            model=_absolute_model(self.model, directory),
            init_from=None if self.init_from is None else str(directory / self.init_from),
        )


def _absolute_source(source: str, directory: Path) -> str:
    """A stream may be a folder, or a name that is found elsewhere."""
    if source.startswith(STREAM_PREFIX):
        name, colon, split = source.removeprefix(STREAM_PREFIX).partition(":")
        return f"{STREAM_PREFIX}{directory / name}{colon}{split}" if (directory / name).is_dir() else source
    return source if source == "stdlib" else str(directory / source)


def _absolute_model(model: str, directory: Path) -> str:
    path = model.removeprefix(HF_PREFIX)
    return model if path == model else f"{HF_PREFIX}{directory / path}"


def load_recipe(path: Path | None, overrides: Sequence[str] = ()) -> RecipeConfig:
    """A recipe from a YAML file (None: all defaults) and ``key=value`` or ``group.key=value`` texts.

    Raises ConfigError, one line, for anything wrong in either."""
    settings = read_yaml(path) if path is not None else {}
    return RecipeConfig.from_mapping(apply_overrides(settings, overrides))
