"""PPO iterations against TRL 1.12, the last release with PPO; both in processes of their own, in turns.

    python benchmarks/against_trl.py [--shape fixed|ragged] [--precision float32|bfloat16] [--rounds 5]

16 prompts an iteration, 4 epochs, 4 full models. `separate` trains all weights, as TRL does: the same updates. The
default arrangement trains the top 4 blocks over a trunk that all roles share: less work for the same episodes, and
labelled so. ragged: prompts of 4 to 64 tokens, and a common word as end token, so that answers differ in length.

bfloat16: TRL's autocast, its default; here `arrangement.precision` and `engine.weights`, which leave what actor and
reference compute in float32.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

from common import Other, environment, ratio, report, rounds
from prompts import PROMPTS, openings

from plaudit.models.load import load_tokenizer, locate

#: more than any number of rounds
ITERATIONS = 100
REQUIREMENTS = ["torch==2.13.0", "trl==1.12.0 transformers==5.19.* accelerate datasets numpy"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", choices=("fixed", "ragged"), default="fixed")
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    python = environment("trl", REQUIREMENTS)
    tokenizer = load_tokenizer("smollm2")
    asked = openings(tokenizer, PROMPTS, args.shape)
    prompts = Path(tempfile.mkdtemp(), "prompts.json")
    prompts.write_text(json.dumps([ids for number in range(ITERATIONS) for ids in asked(number)]))
    # of words that end an answer, this one comes about once in twenty tokens
    end = str(tokenizer.inner.convert_tokens_to_ids("Ġthe")) if args.shape == "ragged" else ""
    ours = ["--precision", args.precision, *(["--end", end] if end else [])]
    sides = {
        "TRL 1.12": Other(python, "trl_side.py", locate("smollm2"), args.shape, end, args.precision, str(prompts)),
        "separate": Other(sys.executable, "plaudit_side.py", "separate", args.shape, *ours),
        "frozen_trunk": Other(sys.executable, "plaudit_side.py", "frozen_trunk", args.shape, *ours),
    }
    said: dict[str, list[dict[str, float]]] = {name: [] for name in sides}

    def asked(name: str):
        def run(number: int) -> float:
            answer = sides[name](max(0, number))
            if number >= 0:
                said[name].append(answer)
            assert answer["updates"] == 4
            return answer["seconds"]

        return run

    seconds = rounds({name: asked(name) for name in sides}, args.rounds)
    for side in sides.values():
        side.close()
    tokens = {name: statistics.mean(a["tokens"] for a in answers) for name, answers in said.items()}
    peak = {name: answers[-1]["peak_mib"] for name, answers in said.items()}
    table = [("system", "iteration, s", "answer tokens", "tokens/s", "speed", "peak MiB", "memory")]
    result = {}
    for name, values in seconds.items():
        middle, faster = statistics.median(values), ratio(seconds["TRL 1.12"], values)
        share = peak[name] / peak["TRL 1.12"]
        rate = tokens[name] / middle
        table.append(
            (name, f"{middle:.1f}", f"{tokens[name]:.0f}", f"{rate:.1f}", f"{faster:.2f} ×", f"{peak[name]:.0f}",
             f"{share:.2f}")
        )  # fmt: skip
        result[name] = {
            "seconds": middle,
            "tokens": tokens[name],
            "speed": faster,
            "peak_mib": peak[name],
            "memory": share,
        }
    report(f"PPO iteration, {args.shape}, {args.precision}: 16 prompts, 4 epochs", table, {"sides": result})


if __name__ == "__main__":
    main()
