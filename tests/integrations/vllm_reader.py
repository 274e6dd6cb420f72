"""A vLLM that follows a run, and notes what it generates from each version. Runs in vLLM's own environment, which has
no pytest and no tests: `.venv-vllm/bin/python vllm_reader.py MODEL RUN FOLDER VERSION ...`

At last it starts again from the folder of the last version's export, and notes what that generates."""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

PROMPTS = [[1, 2, 3], [40, 7], [9, 9, 9, 60], [100]]


def start(model: str, **settings: Any) -> Any:
    from vllm import LLM

    return LLM(
        model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=48,
        skip_tokenizer_init=True,
        **settings,
    )


def generate(llm: Any, to: Path) -> None:
    """Note the likeliest tokens after each prompt."""
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0.0, max_tokens=12, detokenize=False, ignore_eos=True)
    answers = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], greedy, use_tqdm=False)
    whole = to.with_suffix(".making")
    whole.write_text(json.dumps([list(answer.outputs[0].token_ids) for answer in answers]))
    whole.rename(to)


def main(model: str, run: str, folder: Path, versions: list[int]) -> None:
    llm = start(model, weight_transfer_config={"backend": "rayzero"})
    llm.init_weight_transfer_engine({"init_info": {"run": run, "config": f"{model}/config.json"}})
    generate(llm, folder / "tokens-start.json")
    for version in versions:
        llm.start_weight_update()
        llm.update_weights({"update_info": {"version": version}})
        llm.finish_weight_update(weight_version=f"v{version}")
        llm.reset_prefix_cache()  # keys and values that the last version made
        assert llm.get_weight_version() == f"v{version}"
        generate(llm, folder / f"tokens-{version}.json")
    del llm
    gc.collect()
    export = folder / "export"
    while not export.exists():  # it appears when all of it is there
        time.sleep(0.1)
    generate(start(str(export)), folder / "tokens-fresh.json")


if __name__ == "__main__":
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), [int(each) for each in sys.argv[4:]])
