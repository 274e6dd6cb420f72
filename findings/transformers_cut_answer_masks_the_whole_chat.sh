#!/usr/bin/env bash
# transformers 5.23.0: a chat that has lost the start of its first answer on the left has no answer in its assistant mask.
#
# Expected: apply_chat_template(return_assistant_tokens_mask=True) marks the tokens of all {% generation %} blocks that are
#   still in the row; truncation takes away those that it cuts off.
# Seen: it looks up the token of each block's first character, and ends the search at the first block that has none. With
#   truncation_side="left", which keeps the end of a long chat, that is the block that was cut, in part or whole: the
#   answers after it are all there, and none is marked. The row's labels are all -100 and it trains nothing, which is so
#   for every chat that is too long. A block's first character can have no token without truncation too: a ByteLevel
#   post-processor with trim_offsets=True gives a space to no token, so a template that writes a space before the
#   answer marks nothing in any chat. Where the last character has none (a space before <|end|>), the mask runs on to the
#   end of the row, and the user's words are trained on. Nothing warns in any of these.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.23.0 numpy==2.4.6 jinja2==3.1.6
cat >"$folder/mask.py" <<'PY'
import sys

import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CHAT = [{"role": "user", "content": "how are you"}, {"role": "assistant", "content": "I am fine"},
        {"role": "user", "content": "and the weather"}, {"role": "assistant", "content": "it is nice"}]
TEMPLATE = ("{%% for message in messages %%}{%% if message.role == 'user' %%}<|user|>{{ message.content }}{%% else %%}"
            "<|assistant|>%s{%% generation %%}%s{{ message.content }}%s{%% endgeneration %%}<|end|>{%% endif %%}{%% endfor %%}")
EVERY = "I am fine|it is nice"


def tokenizer(before: str, first: str, last: str, *, trims: bool) -> PreTrainedTokenizerFast:
    """A byte-level one that was trained on the chat's words; the strings stand around an answer, see TEMPLATE."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.post_processor = processors.ByteLevel(trim_offsets=trims)
    marks = ["<|user|>", "<|assistant|>", "<|end|>"]
    text = [message["content"] for message in CHAT] * 9 + [" " + message["content"] for message in CHAT] * 9
    made.train_from_iterator(text, trainers.BpeTrainer(vocab_size=500, special_tokens=marks, show_progress=False,
                                                       initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    found = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>", truncation_side="left")
    found.chat_template = TEMPLATE % (before, first, last)
    return found


def marked(fast: PreTrainedTokenizerFast, length: int | None = None) -> tuple[int, str]:
    """(tokens of the row, what its mask marks, with | between pieces)"""
    row = fast.apply_chat_template(CHAT, tokenize=True, return_dict=True, return_assistant_tokens_mask=True,
                                   truncation=length is not None, max_length=length)
    pieces = [fast.decode([token]) if mask else "|" for token, mask in zip(row["input_ids"], row["assistant_masks"])]
    return len(row["input_ids"]), "|".join(piece.strip() for piece in "".join(pieces).split("|") if piece.strip())


plain = tokenizer("", "", "", trims=False)
whole = marked(plain)
by_length = {length: marked(plain, length)[1] for length in range(whole[0], 5, -1)}
space_first = {trims: marked(tokenizer("", " ", "", trims=trims))[1] for trims in (False, True)}
space_last = {trims: marked(tokenizer("", "", " ", trims=trims))[1] for trims in (False, True)}
print(f"transformers {transformers.__version__}, tokens that are kept from the right, and what is marked of them:")
for length, text in by_length.items():
    print(f"  {length}: {text!r}")
print(f"  a space first in the block, by trim_offsets: {space_first}; last in it: {space_last}")
kept, cut = [text for length, text in by_length.items() if length > 12], [by_length[length] for length in range(12, 5, -1)]
sys.exit(not (kept and set(kept) == {EVERY} and set(cut) == {""} and space_first == {False: EVERY, True: ""}
              and space_last[False] == EVERY and "and the weather" in space_last[True]))
PY
"$folder/venv/bin/python" "$folder/mask.py" 2>"$folder/log" || {
  tail -n 20 "$folder/log"
  exit 1
}
