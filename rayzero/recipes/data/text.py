"""Training text and tokens: micro-batches and what every kind of data can do; files to tokens, a train/validation
split, and batches that depend only on their position.

Everything here is a function of the files and the recipe: two processes that read the same files see the same
tokens, and a resumed run needs only the step to go on with the very same batches.
"""

from __future__ import annotations

import glob
import hashlib
import os
import sysconfig
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from rayzero.errors import ConfigError, DataError
from rayzero.quantities import count
from rayzero.recipes.recipe import RecipeConfig

IGNORED = -100  # the target of a position whose token is not learned; cross_entropy leaves it out


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of tokens. All tensors are int64 of shape (rows, seq_len)."""

    inputs: Tensor
    targets: Tensor  # the token after each position, or IGNORED
    positions: Tensor | None = None  # of each token in its own example; None: a row is one example

    def to(self, device: torch.device) -> Batch:
        """The same on a device."""
        positions = None if self.positions is None else self.positions.to(device)
        return Batch(self.inputs.to(device), self.targets.to(device), positions)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a micro-batch is in a run: data that can be read in any order depends on nothing else."""

    step: int  # from 0
    rank: int
    world_size: int
    micro_batch: int  # of the step, from 0
    micro_batches: int  # in a step

    @property
    def index(self) -> int:
        """Its number among the micro-batches of all ranks, from 0."""
        return (self.step * self.micro_batches + self.micro_batch) * self.world_size + self.rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """The beginning of something that was not trained on."""

    tokens: Sequence[int]
    shown: str
    reference: str | None = None  # how it goes on in the data
    stop: Sequence[int] = ()  # tokens at which an answer ends; none: it goes on


class Tokenizer(Protocol):
    """Bytes of one file to token numbers."""

    vocab_size: int

    def encode(self, text: bytes) -> np.ndarray[tuple[int], np.dtype[np.integer]]:
        """1D integers in [0, vocab_size); bytes that are not UTF-8 become the replacement character."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Their text, special tokens included."""
        ...


class Corpus(ABC):
    """What a recipe trains on, tokenized, a part of it kept for validation."""

    about: str  # what it is, for people: "3 files (0.4 MB)"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.vocab_size = tokenizer, tokenizer.vocab_size

    @abstractmethod
    def train_batch(self, place: Place) -> Batch:
        """The micro-batch of a place."""

    @abstractmethod
    def eval_batch(self, index: int) -> Batch:
        """Validation batch ``index``, the same every time."""

    @abstractmethod
    def baseline(self) -> float:
        """Loss in nats of a model that only counts the training tokens, on what validation predicts."""

    @abstractmethod
    def prompts(self, texts: Sequence[str]) -> list[Prompt]:
        """What the trained model goes on from: these texts, or pieces of the validation data."""

    def states(self) -> dict[str, Any]:
        """What a resumed run must load to go on with the same batches, for ``rayzero.track``; {}: nothing."""
        return {}


STDLIB = "stdlib"  # the Python standard library's own sources
BYTES = "bytes"  # the tokenizer without a vocabulary file

_NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_SNIFF = 8192  # bytes looked at to tell text from binary
_FEW_FILES = 20  # with fewer, the validation split is a contiguous tail


class ByteTokenizer:
    """Every byte is a token."""

    vocab_size = 256

    def encode(self, text: bytes) -> np.ndarray[tuple[int], np.dtype[np.integer]]:
        return np.frombuffer(text, dtype=np.uint8)

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode("utf-8", errors="replace")


class FileTokenizer:
    """A Hugging Face ``tokenizer.json``."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError when the file is missing or no tokenizer, or the ``hf`` extra is not installed."""
        try:
            import tokenizers
        except ImportError as exc:
            raise ConfigError(f"tokenizer={str(path)!r} needs the hf extra: pip install 'rayzero[hf]'") from exc
        if not path.is_file():
            raise ConfigError(f"tokenizer: no such file {path}; give 'bytes' or the path of a tokenizer.json")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as exc:  # the library raises bare Exception
            raise ConfigError(f"tokenizer: {path} is not a tokenizer.json: {exc}") from exc
        self.vocab_size: int = self._tokenizer.get_vocab_size()

    def encode(self, text: bytes) -> np.ndarray[tuple[int], np.dtype[np.integer]]:
        ids = self._tokenizer.encode(text.decode("utf-8", errors="replace"), add_special_tokens=False).ids
        return np.asarray(ids, dtype=np.int32)

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=False)
        return text


class FolderTokenizer:
    """A folder of transformers' ``save_pretrained``, perhaps with a chat template."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError when transformers reads no tokenizer there, or the ``hf`` extra is not installed."""
        try:
            from transformers import AutoTokenizer
        except ImportError as exc:
            raise ConfigError(f"tokenizer={str(path)!r} needs the hf extra: pip install 'rayzero[hf]'") from exc
        try:
            self.of_transformers: Any = AutoTokenizer.from_pretrained(path, local_files_only=True)
        except (OSError, ValueError, KeyError) as exc:
            first = str(exc).strip().partition("\n")[0]
            raise ConfigError(f"tokenizer: {path} is not the folder of a tokenizer: {first}") from exc
        self.vocab_size = len(self.of_transformers)

    def encode(self, text: bytes) -> np.ndarray[tuple[int], np.dtype[np.integer]]:
        ids = self.of_transformers.encode(text.decode("utf-8", errors="replace"), add_special_tokens=False)
        return np.asarray(ids, dtype=np.int32)

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self.of_transformers.decode(list(tokens), skip_special_tokens=False)
        return text


def make_tokenizer(name: str) -> Tokenizer:
    """``"bytes"``, the path of a ``tokenizer.json``, or a folder of transformers'."""
    if name == BYTES:
        return ByteTokenizer()
    return FolderTokenizer(Path(name)) if Path(name).is_dir() else FileTokenizer(Path(name))


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """Tokenized text, split in two."""

    train: Tensor  # 1D, uint8 or int32
    validation: Tensor
    vocab_size: int
    num_files: int
    size_bytes: int  # of the text read


def find_files(sources: Sequence[str]) -> list[Path]:
    """The files behind paths, folders (everything below, hidden ones and binaries left out), globs and ``"stdlib"``.

    In order of the sources, sorted within each, no file twice. Raises DataError for a source without files or with
    one that cannot be read."""
    found: dict[Path, None] = {}
    for source in sources:
        try:
            files = _stdlib_files() if source == STDLIB else _files_of(source)
        except OSError as exc:
            raise DataError(f"data: cannot read {exc.filename or source}: {exc.strerror}") from exc
        if not files:
            raise DataError(f"data: {source!r} holds no text files")
        found |= dict.fromkeys(files)
    return list(found)


def _files_of(source: str) -> list[Path]:
    path = Path(source).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        visible = (p for p in sorted(_below(path)) if not any(part[0] == "." for part in p.relative_to(path).parts))
        return [p for p in visible if p.is_file() and _is_text(p)]
    matches = [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]
    if not matches:
        raise DataError(f"data: no such file, folder or glob: {source!r}")
    return [match for match in matches if match.is_file()]


def _below(folder: Path) -> Iterator[Path]:
    """Everything in a folder and its visible subfolders; raises OSError for one that cannot be listed."""

    def refuse(error: OSError) -> None:
        raise error

    for parent, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(parent, name) for name in names)


def _stdlib_files() -> list[Path]:
    found: list[Path] = []
    for parent, folders, names in os.walk(sysconfig.get_paths()["stdlib"]):
        folders[:] = [name for name in folders if name not in _NOT_STDLIB]  # packages installed there are many
        found += (Path(parent, name) for name in names if name.endswith(".py"))
    return sorted(found)


def _is_text(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return b"\0" not in file.read(_SNIFF)
    except OSError as exc:
        raise DataError(f"data: cannot read {path}: {exc.strerror}") from exc


def load_text(
    sources: Sequence[str],
    tokenizer: Tokenizer,
    *,
    validation_fraction: float,
    split: str = "auto",
    max_bytes: int | None = None,
) -> Text:
    """Read, tokenize and split.

    ``split``: "files" puts a file into the validation half when the hash of its content says so (the same file
    always lands on the same side, copies of it too), "tail" keeps the last part of the text, "auto" is "files"
    from 20 files on. ``max_bytes`` stops reading there. Raises DataError for missing or unreadable files.
    """
    texts = _read(find_files(sources), max_bytes)
    by_files = split == "files" or (split == "auto" and len(texts) >= _FEW_FILES)
    train, validation = (_split_files if by_files else _split_tail)(texts, tokenizer, validation_fraction)
    return Text(
        train=_joined(train),
        validation=_joined(validation),
        vocab_size=tokenizer.vocab_size,
        num_files=len(texts),
        size_bytes=sum(map(len, texts)),
    )


def _read(files: Sequence[Path], max_bytes: int | None) -> list[bytes]:
    texts: list[bytes] = []
    left = max_bytes
    for path in files:
        try:
            with path.open("rb") as file:
                # read(n) takes memory for n bytes, whatever the file has
                text = file.read() if left is None else file.read(min(left, os.fstat(file.fileno()).st_size))
        except OSError as exc:
            raise DataError(f"data: cannot read {path}: {exc.strerror}") from exc
        texts.append(text)
        if left is not None:
            left -= len(text)
            if left <= 0:
                break
    return texts


_Tokens = list[np.ndarray[tuple[int], np.dtype[np.integer]]]


def _split_files(texts: Sequence[bytes], tokenizer: Tokenizer, fraction: float) -> tuple[_Tokens, _Tokens]:
    halves: tuple[_Tokens, _Tokens] = ([], [])
    for text in texts:
        draw = int.from_bytes(hashlib.sha256(text).digest()[:8], "big") / 2**64
        halves[draw < fraction].append(tokenizer.encode(text))
    return halves


def _split_tail(texts: Sequence[bytes], tokenizer: Tokenizer, fraction: float) -> tuple[_Tokens, _Tokens]:
    tokens = np.concatenate([tokenizer.encode(text) for text in texts])
    cut = len(tokens) - round(len(tokens) * fraction)
    return [tokens[:cut]], [tokens[cut:]]


def _joined(parts: _Tokens) -> Tensor:
    """One writable tensor: torch refuses to share read-only memory without a warning."""
    return torch.from_numpy(np.concatenate(parts)) if parts else torch.empty(0, dtype=torch.uint8, device="cpu")


def about_files(number: int, size_bytes: int) -> str:
    """Files in words."""
    return f"{count(number, 'file')} ({size_bytes / 1e6:.1f} MB)"


def require_enough(text: Text, seq_len: int) -> None:
    """Raise DataError where a split is too short for one sequence and its next token."""
    for name, tokens in (("training", text.train), ("validation", text.validation)):
        if len(tokens) < seq_len + 2:
            raise DataError(
                f"data: the {name} split has {count(len(tokens), 'token')} of {count(text.num_files, 'file')} "
                f"({text.size_bytes:,} bytes), too few for seq_len {seq_len}; give more text, a smaller seq_len, or "
                "another validation_fraction or split"
            )


def batch_seed(seed: int, step: int, rank: int, micro_batch: int) -> int:
    """A generator seed that depends on all four, so that no two batches of a run are drawn alike."""
    text = f"{seed}/{step}/{rank}/{micro_batch}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 1  # torch wants a signed 64-bit number


def train_batch(tokens: Tensor, *, size: int, seq_len: int, seed: int) -> tuple[Tensor, Tensor]:
    """``size`` random windows: inputs and next tokens, each (size, seq_len), int64."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, len(tokens) - seq_len, (size,), generator=generator, device="cpu")
    return _windows(tokens, starts, seq_len)


def eval_batch(tokens: Tensor, *, index: int, num_batches: int, size: int, seq_len: int) -> tuple[Tensor, Tensor]:
    """Batch ``index`` of ``num_batches``: windows at even distances over all of ``tokens``, the same every time."""
    last = len(tokens) - seq_len - 1
    places = torch.arange(index * size, (index + 1) * size, dtype=torch.float64, device="cpu") / max(
        1, num_batches * size - 1
    )
    return _windows(tokens, (places * last).long(), seq_len)


def _windows(tokens: Tensor, starts: Tensor, seq_len: int) -> tuple[Tensor, Tensor]:
    windows = tokens[starts[:, None] + torch.arange(seq_len + 1, dtype=torch.int64, device="cpu")].long()
    if tokens.dtype == torch.int16:  # mapped uint16, which torch does not index: see ``load_tokens``
        windows &= 0xFFFF
    return windows[:, :-1], windows[:, 1:]


TOKEN_FILE = ".npy"  # the ending of a file of tokens

_TOKEN_DTYPES = {"uint8": np.uint8, "uint16": np.int16, "int32": np.int32, "int64": np.int64}  # how torch sees each
_LOOKED_AT = 1 << 22  # tokens of a file that are checked before training


def load_tokens(path: Path, vocab_size: int, *, validation_fraction: float) -> Text:
    """Map a file of numpy's (1D, uint8, uint16, int32 or int64) of tokens, and split off its tail. Ranks of a host
    share its memory, and only read what they train on. Raises DataError if it is none or has other tokens."""
    try:
        mapped = np.load(path, mmap_mode="c", allow_pickle=False)  # torch warns of memory that it may not write
    except (OSError, ValueError) as exc:
        raise DataError(f"data: {path} is not a file of numpy's: {' '.join(str(exc).split())}") from exc
    name = str(mapped.dtype)
    if mapped.ndim != 1 or name not in _TOKEN_DTYPES:
        raise DataError(f"data: {path} has {name} of shape {mapped.shape}; tokens are 1D {', '.join(_TOKEN_DTYPES)}")
    some = mapped[:: max(1, len(mapped) // _LOOKED_AT)]
    if len(some) and not 0 <= int(some.min()) <= int(some.max()) < vocab_size:
        raise DataError(
            f"data: {path} has tokens from {some.min()} to {some.max()}, the tokenizer from 0 to {vocab_size - 1}; "
            "set tokenizer to the one that made them"
        )
    tokens = torch.from_numpy(mapped.view(_TOKEN_DTYPES[name]))
    cut = len(tokens) - round(len(tokens) * validation_fraction)
    return Text(
        train=tokens[:cut], validation=tokens[cut:], vocab_size=vocab_size, num_files=1, size_bytes=mapped.nbytes
    )


# ---- as a corpus ------------------------------------------------------------------------------------------------

_PROMPTS = 2
_PROMPT_TOKENS = 24


class WindowCorpus(Corpus):
    """Text as a corpus: every micro-batch is windows of one long row of tokens, drawn by its place alone."""

    def __init__(self, text: Text, tokenizer: Tokenizer, recipe: RecipeConfig) -> None:
        super().__init__(tokenizer)
        self.text, self._recipe = text, recipe
        self.about = about_files(text.num_files, text.size_bytes)

    def train_batch(self, place: Place) -> Batch:
        recipe = self._recipe
        seed = batch_seed(recipe.seed, place.step, place.rank, place.micro_batch)
        return Batch(*train_batch(self.text.train, size=recipe.batch_size, seq_len=recipe.seq_len, seed=seed))

    def eval_batch(self, index: int) -> Batch:
        """The batches are spread evenly over the whole validation text."""
        recipe, tokens = self._recipe, self.text.validation
        size, num = recipe.batch_size, recipe.eval_batches
        return Batch(*eval_batch(tokens, index=index, num_batches=num, size=size, seq_len=recipe.seq_len))

    def baseline(self) -> float:
        log_probs = unigram_log_probs(self.text.train, self.vocab_size)
        return unigram_loss(log_probs, (self.eval_batch(index).targets for index in range(self._recipe.eval_batches)))

    def prompts(self, texts: Sequence[str]) -> list[Prompt]:
        if texts:
            return [Prompt(tokens=self.tokenizer.encode(text.encode()).tolist(), shown=text) for text in texts]
        rows, _ = eval_batch(self.text.validation, index=0, num_batches=1, size=_PROMPTS, seq_len=self._recipe.seq_len)
        pieces = rows[:, :_PROMPT_TOKENS].tolist()
        return [Prompt(tokens=piece, shown=self.tokenizer.decode(piece)) for piece in pieces]


# ---- the unigram baseline, which a language model must beat: it knows only how often each token occurs -----------

_MOST = 1 << 28  # tokens: these say enough of how often each occurs, and a mapped file may have any number
_PART = 1 << 24  # tokens; bincount widens them to int64: 128 MiB at once


def unigram_log_probs(tokens: Tensor, vocab_size: int) -> Tensor:
    """Natural logs of the tokens' shares in the training text, with add-one smoothing: (vocab_size,), fp64."""
    counts = torch.zeros(vocab_size, dtype=torch.float64, device="cpu")
    for start in range(0, min(len(tokens), _MOST), _PART):
        part = tokens[start : start + _PART]
        counts += torch.bincount(part.long() & 0xFFFF if part.dtype == torch.int16 else part, minlength=vocab_size)
    counts += 1
    return (counts / counts.sum()).log()


def unigram_loss(log_probs: Tensor, targets: Iterable[Tensor]) -> float:
    """Mean negative log-likelihood of the targets in nats, as cross-entropy counts it."""
    total, count = 0.0, 0
    for batch in targets:
        total -= float(log_probs[batch].sum())
        count += batch.numel()
    return total / count
