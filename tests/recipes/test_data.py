"""What recipes train on besides plain text: which tokens are learned, how rows are packed, what comes when."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rayzero.errors import ConfigError, DataError
from rayzero.recipes.data import recipe_corpus, tokens_of
from rayzero.recipes.data.corpora import Example, ExampleCorpus, ExampleReader, Row, pack, split_lines
from rayzero.recipes.data.text import IGNORED, Batch, ByteTokenizer, FolderTokenizer, Place, make_tokenizer, train_batch
from rayzero.recipes.recipe import RecipeConfig

CHAT = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "and 3+3?"},
    {"role": "assistant", "content": "6"},
    {"role": "user", "content": "thanks"},
]
TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def learned_text(example: Example, decode: Any = lambda tokens: bytes(tokens).decode()) -> list[str]:
    """The runs of tokens that are learned."""
    runs: list[list[int]] = []
    for at, (token, learned) in enumerate(zip(example.tokens, example.learned, strict=True)):
        if learned:
            fresh = not at or not example.learned[at - 1]
            runs += [[token]] if fresh else []
            runs[-1] += [] if fresh else [token]
    return [decode(run) for run in runs]


def place(step: int, rank: int = 0, world_size: int = 1, micro_batch: int = 0, micro_batches: int = 1) -> Place:
    return Place(step=step, rank=rank, world_size=world_size, micro_batch=micro_batch, micro_batches=micro_batches)


# ---- what is learned ------------------------------------------------------------------------------------------------


def test_of_a_chat_the_answers_are_learned_and_what_follows_the_last_one_is_left_out() -> None:
    example = ExampleReader(ByteTokenizer()).read({"messages": CHAT}, "here")
    assert learned_text(example) == ["4<|end|>\n", "6<|end|>\n"]
    assert bytes(example.tokens).decode() == (
        "<|system|>\nBe short.<|end|>\n<|user|>\n2+2?<|end|>\n<|assistant|>\n4<|end|>\n"
        "<|user|>\nand 3+3?<|end|>\n<|assistant|>\n6<|end|>\n"
    )
    whole = ExampleReader(ByteTokenizer(), all_learned=True).read({"messages": CHAT}, "here")
    assert all(whole.learned)
    assert bytes(whole.tokens).decode().endswith("thanks<|end|>\n")


def test_of_a_completion_the_prompt_is_not_learned_and_of_a_text_everything_is() -> None:
    reader = ExampleReader(ByteTokenizer())
    assert learned_text(reader.read({"prompt": "2+2=", "completion": "4"}, "here")) == ["4"]
    assert learned_text(reader.read({"text": "a text"}, "here")) == ["a text"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of characters, as transformers saves one."""
    pytest.importorskip("transformers")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = sorted(set("abcdefghijklmnopqrstuvwxyzT2+?=3469[] .,B'<>/s") | {" ", "\n"})
    vocabulary = {"<unk>": 0, "</s>": 1} | {one: at for at, one in enumerate(characters, start=2)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")
    made.chat_template = TEMPLATE
    path = tmp_path_factory.mktemp("tokenizer")
    made.save_pretrained(path)
    return path


def test_a_tokenizers_own_template_is_used_and_its_answers_are_learned(folder: Path) -> None:
    tokenizer = FolderTokenizer(folder)
    reader = ExampleReader(tokenizer)
    example = reader.read({"messages": CHAT}, "here")
    assert learned_text(example, tokenizer.decode) == ["4</s>", "6</s>"]
    assert tokenizer.decode(example.tokens).startswith("[system]Be short.</s>[user]2+2?</s>[assistant]4</s>")
    assert reader.read({"text": "a"}, "here").tokens[-1] == 1, "a text ends with eos"
    prompt = reader.prompt({"messages": CHAT}, "here")
    assert prompt is not None
    assert tokenizer.decode(prompt.tokens).endswith("[user]and 3+3?</s>[assistant]")
    assert (prompt.shown, prompt.reference) == ("and 3+3?", "6")


def test_a_template_that_rewrites_earlier_messages_is_refused_by_name(folder: Path) -> None:
    tokenizer = FolderTokenizer(folder)
    tokenizer.of_transformers.chat_template = "{{ messages | length }}" + TEMPLATE
    with pytest.raises(DataError, match=r"a\.jsonl line 3: the tokenizer's chat template changes earlier messages"):
        ExampleReader(tokenizer).read({"messages": CHAT}, "a.jsonl line 3")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "is not JSON"),
        ("[1]", r"is \[1\], not an object"),
        ('{"messages": []}', r"messages is \[\], not a list of messages"),
        ('{"messages": [{"role": "user"}]}', "has no content, which must be text"),
        ('{"text": 3}', "has 3 as its text, which must be text"),
        ('{"prompt": "a"}', "has no completion"),
        ("{}", "has no text"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, said: str) -> None:
    (tmp_path / "a.jsonl").write_text(f'{{"text": "right"}}\n\n{line}\n')
    with pytest.raises(DataError, match=rf"a\.jsonl line 3:? .*{said}"):
        recipe_corpus(RecipeConfig(data=str(tmp_path / "a.jsonl")))


# ---- rows -----------------------------------------------------------------------------------------------------------

examples = st.lists(
    st.tuples(st.integers(1, 30), st.integers(0, 30), st.booleans()).map(
        lambda drawn: (lambda n, asked, text: Example(list(range(1, n + 1)), [text or at >= asked for at in range(n)]))(
            drawn[0], drawn[1], drawn[2]
        )
    ),
    max_size=12,
)


@given(examples, st.integers(2, 16), st.booleans())
def test_rows_have_every_learned_token_once_after_what_it_follows(
    given_examples: list[Example], seq_len: int, together: bool
) -> None:
    rows = pack(given_examples, seq_len, together=together)
    found = Counter[tuple[int, int]]()
    for row in rows:
        assert row.inputs.shape == row.targets.shape == row.positions.shape == (seq_len,)
        assert (row.targets != IGNORED).any(), "no row is for nothing"
        starts = (row.positions == 0).sum().item()
        assert together or starts <= 2, "one example, and padding"
        pairs = zip(row.inputs.tolist(), row.targets.tolist(), strict=True)
        found.update(pair for pair in pairs if pair[1] != IGNORED)
    wanted = Counter[tuple[int, int]]()
    for example in given_examples:
        ends = len(example) if all(example.learned) else min(len(example), seq_len + 1)
        wanted.update((example.tokens[at - 1], example.tokens[at]) for at in range(1, ends) if example.learned[at])
    assert found == wanted


def test_examples_share_a_row_while_they_fit_whole() -> None:
    three = [
        Example([1, 2, 3], [False, True, True]),
        Example([4, 5], [False, True]),
        Example([6, 7, 8, 9], [False, False, True, True]),
    ]
    first, second = pack(three, 5, together=True)
    assert first.inputs.tolist() == [1, 2, 4, 0, 0]
    assert first.targets.tolist() == [2, 3, 5, IGNORED, IGNORED]
    assert first.positions.tolist() == [0, 1, 0, 0, 1]
    assert second.targets.tolist() == [IGNORED, 8, 9, IGNORED, IGNORED]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_transformers_model_sees_each_example_of_a_row_alone(family: str) -> None:
    """The mean loss of packed rows is that of the examples one by one, weighted by what they learn."""
    transformers = pytest.importorskip("transformers")
    from rayzero.recipes.lm import next_token_loss

    torch.manual_seed(1)
    small: dict[str, Any] = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0}
    if family == "llama":
        small |= {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        config = transformers.LlamaConfig(max_position_embeddings=32, **small)
    else:
        config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=32, **small)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    some = [Example(torch.randint(1, 64, (n,)).tolist(), [False] * 2 + [True] * (n - 2)) for n in (5, 9, 4)]

    def total(rows: list[Row]) -> tuple[float, int]:
        batches = [Batch(*(part[None].long() for part in (row.inputs, row.targets, row.positions))) for row in rows]
        counts = [int((batch.targets != IGNORED).sum()) for batch in batches]
        with torch.no_grad():
            losses = [float(next_token_loss(model, b.inputs, b.targets, b.positions)) for b in batches]
        return sum(loss * n for loss, n in zip(losses, counts, strict=True)), sum(counts)

    together, alone = pack(some, 16, together=True), pack(some, 16, together=False)
    assert (len(together), len(alone)) == (1, 3)
    (packed, learned), (one_by_one, same) = total(together), total(alone)
    assert learned == same == 12
    assert packed == pytest.approx(one_by_one, rel=1e-5)
    assert total([Row(together[0].inputs, together[0].targets, torch.arange(16))])[0] != pytest.approx(packed, rel=1e-4)


# ---- batches --------------------------------------------------------------------------------------------------------


def lines(number: int) -> list[tuple[dict[str, Any], str]]:
    return [({"prompt": f"{at}:", "completion": f"<{at}>"}, f"line {at}") for at in range(number)]


@given(st.integers(2, 60), st.floats(0.01, 0.99))
def test_both_sides_of_a_split_have_examples_and_copies_stay_together(number: int, fraction: float) -> None:
    training, validation = split_lines(lines(number) * 2, fraction)
    assert len(training) + len(validation) == 2 * number
    assert training
    assert validation
    assert not {told["prompt"] for told, _ in training} & {told["prompt"] for told, _ in validation}
    assert 1 <= len(validation) / 2 <= max(1, round(number * fraction))


def corpus_of(number: int, batch_size: int) -> ExampleCorpus:
    recipe = RecipeConfig(seed=3, batch_size=batch_size, seq_len=12, packing=False, validation_fraction=0.2)
    return ExampleCorpus(lines(number), ExampleReader(ByteTokenizer()), "1 file", recipe)


@pytest.mark.parametrize(("world_size", "micro_batches"), [(1, 1), (2, 1), (2, 3)])
def test_every_row_comes_once_an_epoch_in_another_order_whatever_the_ranks(world_size: int, micro_batches: int) -> None:
    corpus = corpus_of(60, batch_size=2)
    rows = len(corpus._rows)
    assert rows == 48
    seen: list[str] = []
    for step in range(2 * rows // (2 * world_size * micro_batches)):
        for micro in range(micro_batches):
            for rank in range(world_size):
                batch = corpus.train_batch(place(step, rank, world_size, micro, micro_batches))
                seen += [bytes(row.tolist()).decode().rstrip("\0") for row in batch.inputs]
    first, second = seen[:rows], seen[rows:]
    assert Counter(first) == Counter(second)
    assert set(Counter(first).values()) == {1}
    assert first != second


def test_validation_goes_round_its_rows_and_the_baseline_counts_what_is_learned() -> None:
    corpus = corpus_of(10, batch_size=3)
    assert [corpus.eval_batch(0).inputs[at].tolist() for at in (0, 1)] == [
        corpus.eval_batch(0).inputs[2].tolist(),
        corpus.eval_batch(1).inputs[0].tolist(),
    ]
    assert 0 < corpus.baseline() < 5.6
    assert [prompt.reference for prompt in corpus.prompts([])] == [told["completion"] for told, _ in corpus._kept]
    assert corpus.prompts(["7:"])[0].tokens == list(b"7:")


# ---- tokens ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32", "int64"])
def test_mapped_tokens_are_the_batches_of_the_same_tokens_in_memory(tmp_path: Path, dtype: str, folder: Path) -> None:
    tokens = np.random.default_rng(0).integers(0, 40, 5000).astype(dtype)
    np.save(tmp_path / "tokens.npy", tokens)
    recipe = RecipeConfig(data=str(tmp_path / "tokens.npy"), tokenizer=str(folder), seq_len=16, batch_size=4)
    text = tokens_of(recipe, make_tokenizer(recipe.tokenizer))
    assert (len(text.train), len(text.validation)) == (4500, 500)
    plain = torch.from_numpy(tokens[:4500].astype(np.int64))
    ours, theirs = (train_batch(each, size=4, seq_len=16, seed=5) for each in (text.train, plain))
    assert ours[0].equal(theirs[0])
    assert ours[1].equal(theirs[1])
    assert 3.0 < recipe_corpus(recipe).baseline() < 4.0, "ln 40"


def test_large_tokens_of_16_bits_are_not_negative() -> None:
    tokens = torch.from_numpy(np.full(50, 50000, dtype=np.uint16).view(np.int16))
    assert int(train_batch(tokens, size=1, seq_len=8, seed=0)[0].min()) == 50000


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (np.arange(300, dtype=np.uint16), "has tokens from 0 to 299, the tokenizer from 0 to 255"),
        (np.zeros(300, dtype=np.float32), r"has float32 of shape \(300,\)"),
        (np.zeros((30, 10), dtype=np.int32), r"has int32 of shape \(30, 10\)"),
        (np.array([{}], dtype=object), "is not a file of numpy's"),
    ],
)
def test_a_file_that_has_no_tokens_is_refused(tmp_path: Path, made: Any, said: str) -> None:
    np.save(tmp_path / "t.npy", made)
    with pytest.raises(DataError, match=said):
        recipe_corpus(RecipeConfig(data=str(tmp_path / "t.npy"), seq_len=8))


def test_kinds_of_data_are_not_mixed(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.jsonl and b\.txt are of two kinds"):
        recipe_corpus(RecipeConfig(data=["a.jsonl", "b.txt"]))
    with pytest.raises(DataError, match="is a stream, which is given alone"):
        recipe_corpus(RecipeConfig(data=["datasets:x", "b.txt"]))


# ---- streams --------------------------------------------------------------------------------------------------------


@pytest.fixture
def streamed(tmp_path: Path) -> RecipeConfig:
    pytest.importorskip("datasets")
    (tmp_path / "set").mkdir()
    for part in (0, 1):
        rows = "".join(json.dumps({"text": f"{at:03d}" * 3}) + "\n" for at in range(part * 40, part * 40 + 40))
        (tmp_path / "set" / f"train-{part}.jsonl").write_text(rows)
    return RecipeConfig(data=f"datasets:{tmp_path / 'set'}", seq_len=20, batch_size=2, eval_batches=2)


def test_a_stream_goes_on_where_its_state_says(streamed: RecipeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for rank, stop in ((0, 5), (1, 5), (0, 14), (1, 14)):  # an epoch is less than 12 batches
        whole = recipe_corpus(streamed, rank, 2)
        expected = [whole.train_batch(place(step, rank, 2)) for step in range(stop + 7)]
        stopped = recipe_corpus(streamed, rank, 2)
        for step in range(stop):
            assert stopped.train_batch(place(step, rank, 2)).inputs.equal(expected[step].inputs)
        kept = json.loads(json.dumps(stopped.states()["stream"].state_dict(), default=lambda tensor: tensor.tolist()))
        assert (kept["epoch"] > 0) == (stop > 12)
        kept["ready"] = [[torch.tensor(part, dtype=torch.int32) for part in row] for row in kept["ready"]]
        resumed = recipe_corpus(streamed, rank, 2)
        resumed.states()["stream"].load_state_dict(kept)
        for step in range(stop, stop + 7):
            assert resumed.train_batch(place(step, rank, 2)).inputs.equal(expected[step].inputs), (rank, step)
    with pytest.raises(ConfigError, match=r"2 ranks each read a share .*set scaling\.num_workers=2"):
        recipe_corpus(streamed, 0, 1).states()["stream"].load_state_dict(kept)


def test_ranks_share_a_stream_and_validation_is_not_trained_on(streamed: RecipeConfig) -> None:
    seen: list[set[str]] = []
    for rank in (0, 1):
        corpus = recipe_corpus(streamed, rank, 2)
        rows = [row for step in range(9) for row in corpus.train_batch(place(step, rank, 2)).inputs]
        seen.append({bytes(row.tolist()).decode(errors="replace")[:3] for row in rows})
    validated = {bytes(row.tolist()).decode()[:3] for at in (0, 1) for row in corpus.eval_batch(at).inputs}
    assert not seen[0] & seen[1]
    assert not (seen[0] | seen[1]) & validated
    assert validated == {"000", "002", "004", "006"}
    assert corpus.baseline() < 5.6


def test_a_stream_without_its_package_or_its_data_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = RecipeConfig(data="datasets:nowhere/at-all")
    assert recipe.at(tmp_path).data == ("datasets:nowhere/at-all",)
    (tmp_path / "nowhere" / "at-all").mkdir(parents=True)
    assert recipe.at(tmp_path).data == (f"datasets:{tmp_path}/nowhere/at-all",)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"needs the package datasets: pip install 'rayzero\[datasets\]'"):
        recipe_corpus(recipe)
