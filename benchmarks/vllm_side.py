"""vLLM's side of the generation benchmark, in the environment that `make verify-vllm` makes: answers line by line."""

from __future__ import annotations

import json
import os
import sys
import time

SETTINGS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}


def main() -> None:
    os.environ.update(SETTINGS)
    # vLLM reads its settings when it is imported
    from vllm import LLM, SamplingParams, TokensPrompt

    folder, tokens = sys.argv[1], int(sys.argv[2])
    # what vLLM does best here: no graph capture on a CPU, no log-probabilities asked for
    llm = LLM(model=folder, dtype="float32", enforce_eager=True, max_model_len=2048, max_num_seqs=128)
    how = SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    for line in sys.stdin:
        asked = [TokensPrompt(prompt_token_ids=ids) for ids in json.loads(line)]
        started = time.perf_counter()
        answers = llm.generate(asked, how, use_tqdm=False)
        seconds = time.perf_counter() - started
        made = sum(len(answer.outputs[0].token_ids) for answer in answers)
        print("\n" + json.dumps({"seconds": seconds, "tokens": made}), flush=True)


if __name__ == "__main__":
    main()
