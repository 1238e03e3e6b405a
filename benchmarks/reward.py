"""Steps of the reward model: Plaudit's, with all weights and with the top blocks alone, against a plain loop.

    python benchmarks/reward.py [--rounds 5]

Pairs of film reviews of 8 to 96 tokens, 16 pairs a step. The plain loop is what transformers' users write: every text
padded to the longest, `AutoModelForSequenceClassification`, −log σ(chosen − rejected), AdamW. Both sides start from the
same weights, and the losses of their first step must be equal.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

import torch
from common import ratio, report, rounds

from plaudit.algorithms.reward import ranked_answers, ranking_loss
from plaudit.config import OptimizerConfig, RewardConfig
from plaudit.data import reviews
from plaudit.learner import Learner
from plaudit.models.arrangements import trainable_top
from plaudit.models.load import load_tokenizer, new_reward_model
from plaudit.models.network import Network, scalar_head
from plaudit.recipes.common import prepared
from plaudit.types import Answer, Comparison, Preference

PAIRS, LENGTH, MODEL = 16, 96, "smollm2"


def preferences(tokenizer, number: int) -> list[Preference]:
    """The pairs of a step: beginnings of reviews, cut to lengths that differ."""
    draw = random.Random(number)
    texts = [draw.choice(reviews.reviews(0)).text for _ in range(2 * PAIRS)]
    cut = [tokenizer.inner.decode(tokenizer.text_ids(t)[: draw.randint(8, LENGTH - 8)]) for t in texts]
    pairs = [(Answer(a), Answer(b)) for a, b in zip(cut[::2], cut[1::2], strict=True)]
    return [Preference(Comparison(i, "", pair), (0, 1), "benchmark") for i, pair in enumerate(pairs)]


class Ours:
    def __init__(self, blocks: int, tokenizer, head: torch.Tensor):
        model = new_reward_model(MODEL, tokenizer)
        stack, self.trunk = trainable_top(model.base_model, blocks)
        network = Network(stack, scalar=scalar_head(head.clone()))
        config = RewardConfig()
        self.learner = Learner(network, OptimizerConfig(learning_rate=1e-5, micro_batch_tokens=1024), 1000)
        self.tokenizer, self.loss = tokenizer, ranking_loss(config)
        self.losses: list[float] = []

    def __call__(self, number: int) -> float:
        chosen = preferences(self.tokenizer, number)
        started = time.perf_counter()
        rows = prepared(ranked_answers(chosen, self.tokenizer, LENGTH), self.trunk)
        self.losses.append(self.learner.step(rows, self.loss)["loss"])
        return time.perf_counter() - started


class Plain:
    def __init__(self, tokenizer, head: torch.Tensor):
        self.model, self.tokenizer = new_reward_model(MODEL, tokenizer), tokenizer
        with torch.no_grad():
            self.model.score.weight.copy_(head)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, weight_decay=0.0)
        self.losses: list[float] = []

    def __call__(self, number: int) -> float:
        chosen = preferences(self.tokenizer, number)
        started = time.perf_counter()
        rows = ranked_answers(chosen, self.tokenizer, LENGTH)
        width = rows.tokens.shape[1]
        seen = torch.arange(width)[None] < rows.lengths[:, None]
        tokens = torch.where(seen, rows.tokens, self.tokenizer.pad_id)
        scores = self.model(input_ids=tokens, attention_mask=seen.long()).logits[:, 0]
        loss = -torch.nn.functional.logsigmoid(scores[::2] - scores[1::2]).mean()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.losses.append(loss.item())
        return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    count = parser.parse_args().rounds
    tokenizer = load_tokenizer(MODEL)
    width = new_reward_model(MODEL, tokenizer).config.hidden_size
    head = torch.randn(1, width, generator=torch.Generator().manual_seed(0)) / 100
    sides = {
        "plaudit, all weights": Ours(0, tokenizer, head),
        "plaudit, top 4 blocks": Ours(4, tokenizer, head),
        "a plain loop": Plain(tokenizer, head),
    }
    seconds = rounds(dict(sides), count)
    first = {name: side.losses[0] for name, side in sides.items()}
    assert max(first.values()) - min(first.values()) < 1e-4, first
    table = [("side", "seconds a step", "pairs/s", "speed", "first loss")]
    result = {}
    for name, values in seconds.items():
        middle, faster = statistics.median(values), ratio(seconds["a plain loop"], values)
        table.append((name, f"{middle:.2f}", f"{PAIRS / middle:.1f}", f"{faster:.2f} ×", f"{first[name]:.5f}"))
        result[name] = {"seconds": middle, "speed": faster, "first_loss": first[name]}
    report(f"reward model, {PAIRS} pairs a step", table, {"sides": result})


if __name__ == "__main__":
    main()
