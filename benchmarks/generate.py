"""Generation: the local engine against transformers' generate and against the matrix products alone.

    python benchmarks/generate.py [--rows 32] [--tokens 48] [--rounds 5]

Prompts of 16 tokens, fresh in every round; end tokens off, so that every answer has its full length. The limit is what
the products of all linear layers take, in the shapes of prefill and decoding, over weights laid out as the engine has
them. Every answer of the engine is checked: its log-probabilities against those of the scorer; for weights that are
rounded, the mean distance is what the importance weights correct, and the mean KL says how good they are.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from common import ratio, report, rounds
from prompts import openings
from transformers import GenerationConfig

from plaudit.config import SamplingConfig
from plaudit.learner import Scorer
from plaudit.models.fused import Product
from plaudit.models.load import load_language_model
from plaudit.models.network import LanguageHead, Network, token_logprobs
from plaudit.models.stack import WholeStack, blocks_of
from plaudit.rollout.local import LocalEngine
from plaudit.types import Prompt

PROMPT = 16
WEIGHTS = {"plaudit": "float32", "plaudit, bfloat16": "bfloat16", "plaudit, int8": "int8"}


def limit_of(model, rows: int, tokens: int):
    """Seconds of the linear layers' products alone: one prefill and the decoding steps, the output layer included."""
    products = []
    for block in blocks_of(model.base_model)[1]:
        a, m = block.self_attn, block.mlp
        for layers in ([a.q_proj, a.k_proj, a.v_proj], [a.o_proj], [m.gate_proj, m.up_proj], [m.down_proj]):
            products.append(Product(layers, torch.float32, copy=True))
    head = Product([model.get_output_embeddings()], torch.float32, copy=True)
    widths = [product.layers[0].in_features for product in products]
    hidden = model.config.hidden_size
    one = {w: torch.randn(rows, w) for w in {*widths, hidden}}
    many = {w: torch.randn(rows * PROMPT, w) for w in set(widths)}

    @torch.no_grad()
    def run(_number: int) -> float:
        started = time.perf_counter()
        for product, width in zip(products, widths, strict=True):
            product(many[width])
        head(one[hidden])
        for _ in range(tokens - 1):
            for product, width in zip(products, widths, strict=True):
                product(one[width])
            head(one[hidden])
        return time.perf_counter() - started

    return run


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    model, tokenizer = load_language_model(args.model)
    engines = {
        name: LocalEngine(model, tokenizer.end_ids, max_rows=max(128, args.rows), weights=weights)
        for name, weights in WEIGHTS.items()
    }
    sampling = SamplingConfig(temperature=1.0, max_new_tokens=args.tokens, fixed_length=True)
    scorer = Scorer(Network(WholeStack(model.base_model), LanguageHead(model)))
    off: dict[str, list[tuple[float, float, float]]] = {name: [] for name in engines}
    asked = openings(tokenizer, args.rows)

    def ours(name: str):
        def run(number: int) -> float:
            prompts = [Prompt("", tuple(row)) for row in asked(number)]
            started = time.perf_counter()
            rollout = engines[name].generate(prompts, sampling, seed=number)
            taken = time.perf_counter() - started
            assert int(rollout.mask.sum()) == args.rows * args.tokens
            scored = scorer.evaluate(rollout, lambda out, rows: token_logprobs(out, rows, 1.0))
            # under the engine's own distribution the mean of its log-ratio to the trainer's is a KL divergence
            gap = (rollout.logprobs - scored)[rollout.mask]
            off[name].append((float(gap.abs().max()), float(gap.abs().mean()), float(gap.mean())))
            return taken

        return run

    how = GenerationConfig(
        max_new_tokens=args.tokens, min_new_tokens=args.tokens, do_sample=True, top_k=0, top_p=1.0, pad_token_id=0
    )

    def theirs(number: int) -> float:
        ids = torch.tensor(asked(number))
        started = time.perf_counter()
        with torch.no_grad():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=how)
        taken = time.perf_counter() - started
        assert out.shape == (args.rows, PROMPT + args.tokens)
        return taken

    sides = {name: ours(name) for name in engines}
    others = {"transformers generate": theirs, "float32 products alone": limit_of(model, args.rows, args.tokens)}
    seconds = rounds(sides | others, args.rounds)
    total = args.rows * args.tokens
    table = [("side", "tokens/s", "× generate", "of the products' rate", "largest gap", "mean gap", "KL a token")]
    result = {}
    for name, values in seconds.items():
        rate = total / statistics.median(values)
        faster = ratio(seconds["transformers generate"], values)
        limit = ratio(seconds["float32 products alone"], values)
        gaps = off.get(name)
        largest = max(g[0] for g in gaps) if gaps else None
        means = [statistics.mean(g[i] for g in gaps) for i in (1, 2)] if gaps else [None, None]
        cells = [f"{x:.1e}" if x is not None else "" for x in (largest, *means)]
        table.append((name, f"{rate:.0f}", f"{faster:.2f}", f"{limit:.0%}", *cells))
        result[name] = {
            "tokens_per_second": rate,
            "over_generate": faster,
            "of_limit": limit,
            "largest_gap": largest,
            "mean_gap": means[0],
            "kl_nats_per_token": means[1],
        }
    report(f"generation, {args.rows} × {args.tokens} tokens", table, {"sides": result})


if __name__ == "__main__":
    main()
