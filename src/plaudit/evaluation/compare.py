"""What a model gained over its reference, and what it paid: judges, win rate, KL, length, diversity."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from plaudit import ops


@dataclass(frozen=True)
class Answers:
    """One model's answers to the evaluation prompts, and what each judge made of prompt + answer."""

    responses: list[str]
    ended: list[bool]
    judged: dict[str, list[float]]
    scores: list[float]


def distinct(texts: Sequence[str], n: int = 2) -> float:
    """Different n-grams of words as a share of all, over all texts together (Li et al. 2016); 0 if there is none."""
    grams = [tuple(words[i : i + n]) for words in (t.split() for t in texts) for i in range(len(words) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 0.0


def repeated(texts: Sequence[str], n: int = 3) -> float:
    """Share of n-grams of words that their own text has had before, over all texts together; 0 if there is none."""
    total = again = 0
    for words in (text.split() for text in texts):
        grams = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
        total, again = total + len(grams), again + len(grams) - len(set(grams))
    return again / total if total else 0.0


def win_rate(after: Sequence[float], before: Sequence[float]) -> tuple[float, float, float]:
    """Share of prompts on which ``after`` beats ``before`` (a tie is half a win), with Wilson's 95 % interval."""
    wins = sum((a > b) + 0.5 * (a == b) for a, b in zip(after, before, strict=True))
    low, high = ops.wilson_interval(wins, len(after))
    return wins / max(1, len(after)), low, high


def level(judge: str, judged: Sequence[float]) -> float:
    """A judge's figure for many texts: the share above one half for gold (a probability), else the mean."""
    if not judged:
        return 0.0
    return sum(p > 0.5 for p in judged) / len(judged) if judge == "gold" else sum(judged) / len(judged)


def compare(before: Answers, after: Answers, kl: Sequence[float]) -> dict[str, float]:
    """The summary of an evaluation; ``kl`` is each answer's summed k1 against the reference, in nats."""
    first = next(iter(after.judged))
    rate, low, high = win_rate(after.judged[first], before.judged[first])
    spread_before, spread_after = distinct(before.responses), distinct(after.responses)
    summary: dict[str, float] = {"n_eval": len(after.responses)}
    for judge in after.judged:
        summary[f"{judge}_before"] = level(judge, before.judged[judge])
        summary[f"{judge}_after"] = level(judge, after.judged[judge])
    if after.scores:
        summary |= {"score_before": _mean(before.scores), "score_after": _mean(after.scores)}
    spread = torch.tensor(list(kl))
    return summary | {
        "win_rate": rate,
        "win_rate_low": low,
        "win_rate_high": high,
        "kl": float(spread.mean()),
        "kl_stderr": float(spread.std() / max(1, len(spread)) ** 0.5) if len(spread) > 1 else 0.0,
        "ended_before": _mean(before.ended),
        "ended": _mean(after.ended),
        "distinct2_before": spread_before,
        "distinct2_after": spread_after,
        "distinct2_ratio": spread_after / spread_before if spread_before else 0.0,
        "empty": _mean([not r.strip() for r in after.responses]),
        "words_before": _mean([len(r.split()) for r in before.responses]),
        "words_after": _mean([len(r.split()) for r in after.responses]),
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(1, len(values))
