"""Text: what is read, how it is split, and batches that depend on their place alone."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rayzero.errors import ConfigError, DataError
from rayzero.recipes.data.text import (
    ByteTokenizer,
    batch_seed,
    eval_batch,
    find_files,
    load_text,
    make_tokenizer,
    require_enough,
    train_batch,
    unigram_log_probs,
    unigram_loss,
)


def write_files(folder: Path, texts: dict[str, bytes]) -> None:
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text)


def load(*sources: Path | str, fraction: float = 0.25, **options):
    return load_text([str(source) for source in sources], ByteTokenizer(), validation_fraction=fraction, **options)


def test_a_folder_gives_its_text_files_in_order_without_hidden_and_binary_ones(tmp_path):
    write_files(tmp_path, {"b.txt": b"b", "a/z.txt": b"z", ".git/config": b"no", "a/.x": b"no", "c.bin": b"\x00\x01"})
    assert [path.name for path in find_files([str(tmp_path)])] == ["z.txt", "b.txt"]


def test_globs_and_files_may_be_mixed_and_no_file_comes_twice(tmp_path):
    write_files(tmp_path, {"1.py": b"1", "2.py": b"2", "sub/3.py": b"3", "4.txt": b"4"})
    sources = [str(tmp_path / "2.py"), str(tmp_path / "*.py"), str(tmp_path / "**" / "*.py")]
    assert [path.name for path in find_files(sources)] == ["2.py", "1.py", "3.py"]


def test_the_standard_library_is_found_in_order_without_a_look_at_installed_packages():
    root = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    entered: list[Path] | None = []

    def note(event, arguments):  # Python cannot take an audit hook back
        if entered is not None and event == "os.scandir":
            entered.append(Path(arguments[0]))

    sys.addaudithook(note)
    found, folders, entered = find_files(["stdlib"]), entered, None
    assert root in folders
    assert [folder for folder in folders if left_out & set(folder.relative_to(root).parts)] == []
    assert found == [p for p in sorted(root.rglob("*.py")) if not left_out & set(p.relative_to(root).parts)]


@pytest.mark.parametrize("source", ["nowhere", "nowhere/*.txt"])
def test_missing_data_is_named(tmp_path, source):
    with pytest.raises(DataError, match=r"no such file, folder or glob: .*nowhere"):
        load(tmp_path / source)


def test_an_empty_folder_and_empty_text_are_errors(tmp_path):
    with pytest.raises(DataError, match="holds no text files"):
        load(tmp_path)
    write_files(tmp_path, {"empty.txt": b""})
    with pytest.raises(DataError, match="the training split has 0 tokens of 1 file"):
        require_enough(load(tmp_path), 16)


def test_too_little_validation_text_is_an_error_that_says_so(tmp_path):
    write_files(tmp_path, {"short.txt": b"x" * 100})
    require_enough(load(tmp_path, fraction=0.5), 16)
    with pytest.raises(DataError, match="the validation split has 10 tokens"):
        require_enough(load(tmp_path, fraction=0.1), 16)


def test_a_few_files_keep_their_tail_for_validation(tmp_path):
    write_files(tmp_path, {"a": b"A" * 60, "b": b"B" * 40})
    text = load(tmp_path)
    assert bytes(text.train) == b"A" * 60 + b"B" * 15
    assert bytes(text.validation) == b"B" * 25


def test_many_files_are_split_by_content_so_that_copies_stay_together(tmp_path):
    texts = {f"{i:03d}": b"%03d" % i for i in range(200)}
    write_files(tmp_path / "one", texts)
    write_files(tmp_path / "two", {f"renamed/{name}": text for name, text in texts.items()})
    one, both = load(tmp_path / "one"), load(tmp_path / "one", tmp_path / "two")
    assert 0.15 < len(one.validation) / 600 < 0.35
    assert bytes(both.validation) == bytes(one.validation) * 2


def test_reading_stops_at_max_bytes(tmp_path):
    write_files(tmp_path, {"a": b"A" * 60, "b": b"B" * 40, "c": b"C" * 10})
    text = load(tmp_path, max_bytes=70)
    assert (text.size_bytes, text.num_files) == (70, 2)
    assert bytes(text.train) + bytes(text.validation) == b"A" * 60 + b"B" * 10
    assert load(tmp_path, max_bytes=1 << 62).size_bytes == 110, "and takes no memory for more than there is"


def test_a_batch_is_windows_of_the_text_and_what_follows_them():
    tokens = torch.arange(200, dtype=torch.uint8)
    inputs, targets = train_batch(tokens, size=5, seq_len=7, seed=3)
    assert inputs.shape == targets.shape == (5, 7)
    assert torch.equal(inputs + 1, targets)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_a_batch_depends_on_its_place_alone():
    tokens = torch.randint(0, 256, (5000,), dtype=torch.uint8)
    places = [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)]
    batches = [train_batch(tokens, size=4, seq_len=16, seed=batch_seed(*place))[0] for place in places]
    again = [train_batch(tokens, size=4, seq_len=16, seed=batch_seed(*place))[0] for place in places]
    assert all(torch.equal(a, b) for a, b in zip(batches, again, strict=True))
    assert len({tuple(batch.flatten().tolist()) for batch in batches}) == len(places)


@given(numel=st.integers(10, 300), seq_len=st.integers(1, 8), size=st.integers(1, 4), num=st.integers(1, 4))
def test_validation_covers_the_text_from_its_start_to_its_end(numel, seq_len, size, num):
    tokens = torch.arange(numel, dtype=torch.int32)
    batches = [eval_batch(tokens, index=i, num_batches=num, size=size, seq_len=seq_len) for i in range(num)]
    starts = torch.cat([inputs[:, 0] for inputs, _ in batches])
    assert starts[0] == 0
    assert torch.equal(starts, starts.sort().values)
    if num * size > 1:
        assert batches[-1][1][-1, -1] == numel - 1


def test_every_window_can_be_drawn():
    tokens = torch.arange(6, dtype=torch.uint8)
    starts = {int(train_batch(tokens, size=1, seq_len=4, seed=seed)[0][0, 0]) for seed in range(50)}
    assert starts == {0, 1}


def test_the_unigram_loss_is_the_entropy_of_its_own_text():
    tokens = torch.tensor([0, 0, 0, 1] * 1000, dtype=torch.uint8)
    log_probs = unigram_log_probs(tokens, vocab_size=2)
    entropy = -(0.75 * torch.tensor(0.75).log() + 0.25 * torch.tensor(0.25).log())
    assert unigram_loss(log_probs, [tokens.long()]) == pytest.approx(float(entropy), abs=1e-3)


def test_a_token_never_seen_has_a_finite_loss():
    log_probs = unigram_log_probs(torch.zeros(10, dtype=torch.uint8), vocab_size=256)
    assert unigram_loss(log_probs, [torch.tensor([255])]) == pytest.approx(5.583, abs=1e-3)  # ln 266


def test_a_tokenizer_file_is_used_and_a_wrong_one_is_named(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"[UNK]": 0, "to": 1, "be": 2, "or": 3, "not": 4}, "[UNK]")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    tokenizer = make_tokenizer(str(tmp_path / "tokenizer.json"))
    assert tokenizer.vocab_size == 5
    assert tokenizer.encode(b"to be or not to \xff").tolist()[:5] == [1, 2, 3, 4, 1]
    with pytest.raises(ConfigError, match="no such file"):
        make_tokenizer(str(tmp_path / "missing.json"))
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"bad\.json is not a tokenizer\.json"):
        make_tokenizer(str(tmp_path / "bad.json"))
