"""Generation: the local engine against transformers' generate and against the matrix products alone.

    python benchmarks/generate.py [--rows 32] [--tokens 48] [--rounds 5]

Prompts of 16 tokens, fresh in every round; end tokens off, so that every answer has its full length. The limit is what
the products of all linear layers take, in the shapes of prefill and decoding, over weights laid out as the engine has
them. Every answer of the engine is checked: its log-probabilities against those of the scorer.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from common import ratio, report, rounds
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
    engine = LocalEngine(model, tokenizer.end_ids, max_rows=max(128, args.rows))
    sampling = SamplingConfig(temperature=1.0, max_new_tokens=args.tokens, fixed_length=True)
    scorer = Scorer(Network(WholeStack(model.base_model), LanguageHead(model)))
    worst = 0.0

    def prompts_of(number: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 + number)
        return torch.randint(1000, 40000, (args.rows, PROMPT), generator=generator)

    def ours(number: int) -> float:
        nonlocal worst
        prompts = [Prompt("", tuple(row)) for row in prompts_of(number).tolist()]
        started = time.perf_counter()
        rollout = engine.generate(prompts, sampling, seed=number)
        taken = time.perf_counter() - started
        assert int(rollout.mask.sum()) == args.rows * args.tokens
        scored = scorer.evaluate(rollout, lambda out, rows: token_logprobs(out, rows, 1.0))
        worst = max(worst, float((scored - rollout.logprobs).abs().max()))
        return taken

    how = GenerationConfig(
        max_new_tokens=args.tokens, min_new_tokens=args.tokens, do_sample=True, top_k=0, top_p=1.0, pad_token_id=0
    )

    def theirs(number: int) -> float:
        ids = prompts_of(number)
        started = time.perf_counter()
        with torch.no_grad():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=how)
        taken = time.perf_counter() - started
        assert out.shape == (args.rows, PROMPT + args.tokens)
        return taken

    seconds = rounds(
        {"plaudit": ours, "transformers generate": theirs, "matrix products": limit_of(model, args.rows, args.tokens)},
        args.rounds,
    )
    total = args.rows * args.tokens
    limit = ratio(seconds["matrix products"], seconds["plaudit"])
    faster = ratio(seconds["transformers generate"], seconds["plaudit"])
    rate = {name: total / statistics.median(values) for name, values in seconds.items()}
    report(
        f"generation, {args.rows} × {args.tokens} tokens, float32",
        [
            ("side", "tokens/s", "plaudit is"),
            ("plaudit", f"{rate['plaudit']:.0f}", ""),
            ("transformers generate", f"{rate['transformers generate']:.0f}", f"{faster:.2f} ×"),
            ("matrix products alone", f"{rate['matrix products']:.0f}", f"{100 * limit:.0f} % of it"),
        ],
        {"tokens_per_second": rate, "over_generate": faster, "of_limit": limit, "logprob_error": worst},
    )


if __name__ == "__main__":
    main()
