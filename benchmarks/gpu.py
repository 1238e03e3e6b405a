"""On a GPU: generation and PPO iterations of models with 1 to 3 billion random weights.

    python benchmarks/gpu.py [--sizes 1B 3B] [--prompts 64] [--write]
    python benchmarks/gpu.py --sizes tiny --prompts 8 --device cpu      # that it works, where no GPU is

Weights are random, so answers mean nothing, and cost what any answers cost. Every engine's log-probabilities are
compared with the trainer's, and every iteration's first ratio with 1. What does not fit into the GPU's memory is said
to. ``--write`` puts the table into benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from common import HERE, machine, report
from plaudit_side import Side
from prompts import SHAPES, unread
from transformers import LlamaConfig, LlamaForCausalLM

from plaudit.config import SamplingConfig
from plaudit.device import Clock
from plaudit.learner import Scorer
from plaudit.models.load import load_language_model, load_tokenizer
from plaudit.models.network import LanguageHead, Network, token_logprobs
from plaudit.models.stack import WholeStack
from plaudit.rollout.local import LocalEngine
from plaudit.types import Prompt

SIZES = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4},
    "1B": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 16},
    "3B": {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24},
}
#: arrangement, precision, gradient checkpointing
ITERATIONS = (
    ("frozen_trunk", "float32", False),
    ("frozen_trunk", "bfloat16", False),
    ("separate", "bfloat16", True),
)
MARKS = ("<!-- gpu -->", "<!-- end of gpu -->")


def random_model(size: str, folder: Path) -> str:
    """A folder with a Llama-shaped model of that size and a tokenizer of bytes."""
    heads = SIZES[size]["num_attention_heads"]
    config = LlamaConfig(
        **SIZES[size], num_key_value_heads=heads // 4, vocab_size=49152, eos_token_id=0, pad_token_id=1
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    load_tokenizer("tiny").inner.save_pretrained(folder)
    return str(folder)


def generation(folder: str, count: int, weights: str, device: torch.device) -> tuple[float, float]:
    """Tokens a second, and the largest distance of a log-probability to the trainer's."""
    model, tokenizer = load_language_model(folder)
    model.to(device)
    engine = LocalEngine(model, tokenizer.end_ids, weights=weights, max_rows=count, device=device)
    sampling = SamplingConfig(max_new_tokens=SHAPES["fixed"][0], fixed_length=True)
    rates = []
    clock = Clock(device)
    for number in range(4):
        asked = [Prompt("", tuple(ids)) for ids in unread(count)(number)]
        clock.reset()
        with clock("generate"):
            rollout = engine.generate(asked, sampling, seed=number)
        rates.append(int(rollout.mask.sum()) / clock.seconds["generate"])
    network = Network(WholeStack(model.base_model), LanguageHead(model))
    scored = Scorer(network, device, 4096).evaluate(rollout, lambda out, rows: token_logprobs(out, rows, 1.0))
    return statistics.median(rates[1:]), float((scored - rollout.logprobs).abs().max())


def iterations(
    folder: str, count: int, kind: str, precision: str, recompute: bool, device: torch.device
) -> tuple[float, float]:
    """Tokens a second of PPO iterations, and the largest distance of their first ratio's logarithm to 0."""
    side = Side(
        kind, "fixed", count, precision=precision, model=folder, device=device, recompute=recompute, readable=False
    )
    said = [side.iterate(number) for number in range(4)][1:]
    rate = statistics.median(s["tokens"] / s["seconds"] for s in said)
    return rate, max(s["first_log_ratio"] for s in said)


def works(folder: str, count: int, device: torch.device) -> Iterator[tuple[str, Callable[[], tuple[float, float]]]]:
    """What is measured of a model, by name."""
    for weights in ("float32", "bfloat16"):
        yield f"generation, {weights}", partial(generation, folder, count, weights, device)
    for kind, precision, recompute in ITERATIONS:
        yield f"PPO, {kind}, {precision}", partial(iterations, folder, count, kind, precision, recompute, device)


def put(table: list[tuple[str, ...]], name: str) -> None:
    """Writes the table between the marks of the benchmarks' page."""
    page = HERE / "README.md"
    before, rest = page.read_text().split(MARKS[0])
    lines = ["| " + " | ".join(row) + " |" for row in table]
    lines.insert(1, "|" + "---|" * len(table[0]))
    page.write_text("\n".join([before + MARKS[0], name, "", *lines, MARKS[1] + rest.split(MARKS[1])[1]]))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["1B", "3B"])
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--write", action="store_true", help="put the table into benchmarks/README.md")
    args = parser.parse_args()
    device = torch.device(args.device)
    on_gpu = device.type == "cuda"
    if on_gpu and not torch.cuda.is_available():
        sys.exit("no CUDA GPU here, so there is nothing to measure; --sizes tiny --device cpu tries the script")
    table: list[tuple[str, ...]] = [("model", "work", "tokens/s", "GiB on the GPU", "check")]
    result = []
    for size in args.sizes:
        with tempfile.TemporaryDirectory() as place:
            folder = random_model(size, Path(place, "model"))
            for name, work in works(folder, args.prompts, device):
                if on_gpu:
                    torch.cuda.empty_cache()
                    torch.cuda.reset_peak_memory_stats(device)
                try:
                    rate, check = work()
                except torch.cuda.OutOfMemoryError:
                    table.append((size, name, "does not fit", "", ""))
                    continue
                peak = torch.cuda.max_memory_allocated(device) / 2**30 if on_gpu else 0.0
                table.append((size, name, f"{rate:.0f}", f"{peak:.1f}", f"{check:.1e}"))
                result.append({"size": size, "work": name, "tokens_per_second": rate, "gib": peak, "check": check})
                print("  " + "  ".join(table[-1]), file=sys.stderr, flush=True)
    where = f"{machine()['gpu'] or args.device}, {args.prompts} prompts"
    report(where, table, {"rows": result})
    if args.write:
        put(table, where)


if __name__ == "__main__":
    main()
