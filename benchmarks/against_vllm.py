"""Generation against vLLM's CPU build, each in a process of its own, in turns.

    python benchmarks/against_vllm.py [--rows 32] [--tokens 48] [--rounds 5]

float32, temperature 1, prompts of 16 tokens that are fresh in every round, end tokens off. Plaudit returns the
log-probability of every token, which is checked against the trainer's; vLLM is not asked for them.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

from common import HERE, Other, ratio, report, rounds
from prompts import openings

from plaudit.config import SamplingConfig
from plaudit.learner import Scorer
from plaudit.models.load import load_language_model, locate
from plaudit.models.network import LanguageHead, Network, token_logprobs
from plaudit.models.stack import WholeStack
from plaudit.rollout.local import LocalEngine
from plaudit.types import Prompt


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    root = HERE.parent
    subprocess.run(["make", "--silent", "-C", str(root), ".venv-vllm/.installed"], check=True)
    theirs = Other(root / ".venv-vllm/bin/python", "vllm_side.py", locate("smollm2"), str(args.tokens))
    model, tokenizer = load_language_model("smollm2")
    engine = LocalEngine(model, tokenizer.end_ids)
    scorer = Scorer(Network(WholeStack(model.base_model), LanguageHead(model)))
    sampling = SamplingConfig(temperature=1.0, max_new_tokens=args.tokens, fixed_length=True)
    asked = openings(tokenizer, args.rows)
    worst = 0.0

    def ours(number: int) -> float:
        nonlocal worst
        prompts = [Prompt("", tuple(ids)) for ids in asked(number)]
        started = time.perf_counter()
        rollout = engine.generate(prompts, sampling, seed=number)
        taken = time.perf_counter() - started
        assert int(rollout.mask.sum()) == args.rows * args.tokens
        scored = scorer.evaluate(rollout, lambda out, rows: token_logprobs(out, rows, 1.0))
        worst = max(worst, float((scored - rollout.logprobs).abs().max()))
        return taken

    def vllm(number: int) -> float:
        answer = theirs(asked(number))
        assert answer["tokens"] == args.rows * args.tokens
        return answer["seconds"]

    seconds = rounds({"plaudit": ours, "vLLM": vllm}, args.rounds)
    theirs.close()
    total, faster = args.rows * args.tokens, ratio(seconds["vLLM"], seconds["plaudit"])
    rate = {name: total / statistics.median(values) for name, values in seconds.items()}
    table = [("side", "tokens/s", "× vLLM"), ("plaudit", f"{rate['plaudit']:.0f}", f"{faster:.2f}")]
    table.append(("vLLM", f"{rate['vLLM']:.0f}", ""))
    result = {"tokens_per_second": rate, "over_vllm": faster, "largest_gap": worst}
    report(f"generation against vLLM, {args.rows} × {args.tokens} tokens, float32", table, result)


if __name__ == "__main__":
    sys.exit(main())
