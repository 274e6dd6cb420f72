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


Generated = list[list[tuple[int, float]]]


def generated(llm: Any) -> Generated:
    """The likeliest tokens after each prompt, each with its log-probability."""
    from vllm import SamplingParams

    llm.reset_prefix_cache()  # keys and values that older weights made
    greedy = SamplingParams(temperature=0.0, max_tokens=12, logprobs=0, detokenize=False, ignore_eos=True)
    answers = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], greedy, use_tqdm=False)
    return [
        [(token, each.logprob) for one in answer.outputs[0].logprobs for token, each in one.items()]
        for answer in answers
    ]


def note(tokens: Generated, to: Path) -> None:
    whole = to.with_suffix(".making")
    whole.write_text(json.dumps(tokens))
    whole.rename(to)


def update(llm: Any, version: int) -> None:
    llm.update_weights({"update_info": {"version": version}})


def main(model: str, run: str, folder: Path, versions: list[int]) -> None:
    llm = start(model, weight_transfer_config={"backend": "rayzero"})
    llm.init_weight_transfer_engine({"init_info": {"run": run}})
    note(generated(llm), folder / "tokens-start.json")
    for number, version in enumerate(versions):
        if number != 1:
            llm.start_weight_update()
        update(llm, version)
        llm.finish_weight_update(weight_version=f"v{version}")
        assert llm.get_weight_version() == f"v{version}"
        tokens = generated(llm)
        if number == 1:  # of a version that is gone, nothing comes: the model has what it had
            llm.start_weight_update()
            said = "nothing"
            try:
                update(llm, versions[0])
            except Exception as error:
                said = str(error)
            assert "is overwritten" in said, said
            assert generated(llm) == tokens
        if number == 0:  # who updates dies now, and the next one has a newer version
            llm.start_weight_update()
            update(llm, version)
        note(tokens, folder / f"tokens-{version}.json")
    del llm
    gc.collect()
    export = folder / "export"
    while not export.exists():  # it appears when all of it is there
        time.sleep(0.1)
    note(generated(start(str(export))), folder / "tokens-fresh.json")


if __name__ == "__main__":
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), [int(each) for each in sys.argv[4:]])
