"""The reward model: a score that explains which answers were preferred."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from plaudit import ops
from plaudit.config import RewardConfig
from plaudit.data.order import shuffled
from plaudit.learner import Loss, Stats, weighted
from plaudit.models.network import Outputs, text_scores, token_scores
from plaudit.tokenizer import Tokenizer
from plaudit.types import Preference, RankedAnswers, Sequences, Weights


def ranking_loss(config: RewardConfig) -> Loss:
    """The learner's loss: one forward pass an answer, however many pairs it stands in.

    A comparison's loss is the mean over its terms: its pairs, its winners, or the places of its ranking.
    """

    def loss(outputs: Outputs, rows: Sequences, weights: Weights) -> tuple[Tensor, Stats]:
        assert isinstance(rows, RankedAnswers)
        scores = text_scores(outputs, rows)
        losses, terms = _every_token(outputs, rows) if config.loss == "every_token" else _terms(config, scores, rows)
        per_row = rows.averaged(losses, terms)
        if config.centring:
            together = rows.together().float()
            mean = (together @ scores) / together.sum(1)
            per_row = per_row + config.centring * mean.square() / together.sum(1)
        preferred = rows.preferred()
        right = rows.averaged(ops.ranking_accuracy(scores, preferred), preferred.sum(1))
        return (per_row * weights.main).sum(), weighted({"accuracy": right}, weights.places)

    return loss


def _terms(config: RewardConfig, scores: Tensor, rows: RankedAnswers) -> tuple[Tensor, Tensor]:
    """Each row's summed loss terms, and how many they are."""
    preferred = rows.preferred()
    match config.loss:
        case "pairwise":
            pairs = rows.pairs()
            # equal places are to score alike: no margin between them
            margin = torch.where(preferred, rows.margin[:, None], 0.0) if config.margins else 0.0
            plain = not config.label_smoothing and config.ties != "half" and bool((rows.certainty == 1).all())
            target = 1.0 if plain else rows.targets(config.label_smoothing)
            return ops.pairwise_ranking_loss(scores, pairs, margin, target), pairs.sum(1)
        case "averaged_losers":
            return ops.averaged_losers_loss(scores, preferred), preferred.any(1)
        case "plackett_luce":
            no_better = rows.together() & (rows.rank[:, None] <= rows.rank[None, :])
            return ops.plackett_luce_loss(scores, preferred, no_better), preferred.any(1)
        case "pick_best":
            best = preferred & ~preferred.any(0)[:, None]
            return ops.plackett_luce_loss(scores, best, rows.together()), best.any(1)
    raise ValueError(f"unknown loss {config.loss!r}")


def _every_token(outputs: Outputs, rows: RankedAnswers) -> tuple[Tensor, Tensor]:
    """The every-token loss of every pair a row wins, summed. Beyond its end a text keeps its last token's score."""
    scores = token_scores(outputs)
    at = torch.arange(scores.shape[1], device=scores.device)
    scores = scores.gather(1, torch.minimum(at, rows.lengths[:, None] - 1))
    winner, loser = rows.preferred().nonzero(as_tuple=True)
    losses = scores.new_zeros(len(rows))
    if len(winner):
        each = ops.every_token_loss(
            scores[winner],
            scores[loser],
            rows.tokens[winner],
            rows.tokens[loser],
            rows.lengths[winner],
            rows.lengths[loser],
        )
        losses = losses.index_add(0, winner, each)
    return losses, rows.preferred().sum(1)


@dataclass(frozen=True)
class Split:
    train: list[Preference]
    held_out: list[Preference]
    unusable: int


def split(preferences: Sequence[Preference], held_out: float, *, ties: bool = False) -> Split:
    """Divides preferences by prompt (by their texts, where there is no prompt), the same way on every call.

    A comparison whose provenance names a split keeps it. Ties throughout (unless ``ties`` are to be learned), and
    answers that are all the same text, say nothing about an order and are counted as unusable.
    """
    parts: tuple[list[Preference], list[Preference]] = ([], [])
    unusable = 0
    for p in preferences:
        texts = {a.text for a in p.comparison.answers}
        if (len(set(p.ranks)) < 2 and not ties) or len(texts) < 2:
            unusable += 1
            continue
        given = p.comparison.provenance.get("split")
        key = p.comparison.prompt or "\0".join(sorted(texts))
        share = int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big") / 2**32
        parts[given == "held_out" if given else share < held_out].append(p)
    return Split(parts[0], parts[1], unusable)


def ranked_answers(
    preferences: Sequence[Preference], tokenizer: Tokenizer, max_length: int, *, ties: bool = False
) -> RankedAnswers:
    """Rows of prompt and answer, without an end token; what is longer than ``max_length`` loses its beginning.

    A comparison's provenance may hold its ``margin`` and its ``certainty`` (how sure it is that the better placed
    answer is the better, 0.5 to 1).
    """
    ids, masks, groups, ranks = [], [], [], []
    margins, certainties = [], []
    for group, p in enumerate(preferences):
        prompt = tokenizer.asked_ids(p.comparison)
        seen: dict[tuple[int, ...], int] = {}
        for answer, rank in zip(p.comparison.answers, p.ranks, strict=True):
            row = tokenizer.scored_ids(prompt, answer.text)
            ids.append(row[-max_length:])
            masks.append([i >= len(prompt) for i in range(len(row))][-max_length:])
            groups.append(group)
            margins.append(float(p.comparison.provenance.get("margin", 0.0)))
            certainties.append(p.certainty)
            # Rows that are the same after cutting score the same; an order between them teaches nothing: it is a tie.
            ranks.append(seen.setdefault(tuple(ids[-1]), rank))
    return RankedAnswers.pack(
        ids,
        masks,
        group=torch.tensor(groups),
        rank=torch.tensor(ranks),
        margin=torch.tensor(margins),
        certainty=torch.tensor(certainties),
        ties=ties,
    )


def pairs_equal_after_cutting(preferences: Sequence[Preference], tokenizer: Tokenizer, max_length: int) -> int:
    """How many ordered pairs of answers are the same once cut, so that :func:`ranked_answers` makes ties of them."""
    equal = 0
    for p in preferences:
        prompt = tokenizer.asked_ids(p.comparison)
        kept = [tokenizer.scored_ids(prompt, a.text)[-max_length:] for a in p.comparison.answers]
        places = range(len(kept))
        equal += sum(kept[i] == kept[j] for i in places for j in places if p.ranks[i] < p.ranks[j])
    return equal


def batches(count: Sequence[int], answers: int, seed: int, epoch: int) -> list[list[int]]:
    """Comparisons in a shuffled order, cut into batches of about ``answers`` answers; each is used once an epoch."""
    made: list[list[int]] = []
    size = answers
    for i in shuffled(len(count), seed, epoch):
        if size + count[i] > answers:
            made.append([])
            size = 0
        made[-1].append(i)
        size += count[i]
    return made


@dataclass(frozen=True)
class RankingReport:
    """How well scores explain held-out preferences."""

    accuracy: float
    low: float
    high: float
    pairs: int
    comparisons: int
    ece: float
    calibration: list[dict[str, float]]


def report(scores: Float[Tensor, " B"], rows: RankedAnswers) -> RankingReport:
    """Pair accuracy with a 95 % interval over comparisons, and the calibration of σ(r_i − r_j).

    The pairs of one comparison share their answers, so the interval comes from the comparisons' own accuracies where
    there are several pairs in each (Wilson's where each has one). A tied score is wrong.
    """
    preferred = rows.preferred()
    right = ops.ranking_accuracy(scores, preferred)
    pairs = int(preferred.sum())
    groups = torch.unique(rows.group)
    wins = torch.stack([right[rows.group == g].sum() for g in groups])
    totals = torch.stack([preferred[rows.group == g].sum() for g in groups]).float()
    accuracy = float(right.sum()) / max(1, pairs)
    if pairs in (0, len(groups)) or len(groups) < 2:
        low, high = ops.wilson_interval(accuracy * len(groups), len(groups))
    else:
        # Ratio estimator: the variance of a ratio of sums over independent comparisons.
        residual = wins - accuracy * totals
        error = float(residual.square().sum().sqrt()) / pairs * math.sqrt(len(groups) / (len(groups) - 1))
        low, high = max(0.0, accuracy - 1.96 * error), min(1.0, accuracy + 1.96 * error)
    bins, ece = _calibration(scores, preferred)
    return RankingReport(accuracy, low, high, pairs, len(groups), ece, bins)


def _calibration(scores: Float[Tensor, " B"], preferred: Bool[Tensor, "B B"]) -> tuple[list[dict[str, float]], float]:
    """Ten bins of the probability given to the likelier answer of each pair, and the expected calibration error."""
    i, j = preferred.nonzero(as_tuple=True)
    margin = scores[i] - scores[j]
    confidence, right = torch.sigmoid(margin.abs()), (margin > 0).float()
    bins, ece = [], 0.0
    for k in range(10):
        inside = (confidence >= 0.5 + k * 0.05) & (confidence < 0.55 + k * 0.05 + (k == 9))
        if inside.any():
            said, seen = float(confidence[inside].mean()), float(right[inside].mean())
            bins.append({"confidence": said, "accuracy": seen, "pairs": int(inside.sum())})
            ece += abs(said - seen) * float(inside.float().mean())
    return bins, ece
