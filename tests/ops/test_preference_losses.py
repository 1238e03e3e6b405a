"""Losses on scores of preferred and other answers, against literal pairs and hand-computed numbers."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from jaxtyping import TypeCheckError

from plaudit import ops
from plaudit.types import RankedAnswers

VECTORS = Path(__file__).parents[3] / "shared" / "vectors"


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x))


def ranked(groups: list[int], ranks: list[int]) -> RankedAnswers:
    rows = [[5, 6]] * len(groups)
    return RankedAnswers.pack(rows, [[True, True]] * len(groups), group=torch.tensor(groups), rank=torch.tensor(ranks))


def mean(rows: RankedAnswers, sums: torch.Tensor, terms: torch.Tensor) -> float:
    return float((rows.averaged(sums, terms) * rows.weights().main).sum())


def test_bradley_terry_at_equal_scores_is_log_two():
    assert ops.bradley_terry(torch.tensor([0.3]), torch.tensor([0.3])).item() == pytest.approx(0.693147, abs=1e-6)


def test_bradley_terry_is_the_negative_log_of_the_probability_with_margin():
    losses = ops.bradley_terry(torch.tensor([1.0, 1.0]), torch.tensor([0.0, 0.0]), torch.tensor([0.0, 0.25]))
    assert losses.tolist() == pytest.approx([-log_sigmoid(1.0), -log_sigmoid(0.75)], abs=1e-6)


def test_bradley_terry_of_a_pair_and_of_its_swap_are_the_two_probabilities():
    g = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 9, generator=g)
    total = torch.exp(-ops.bradley_terry(a, b)) + torch.exp(-ops.bradley_terry(b, a))
    assert torch.allclose(total, torch.ones(9))


def test_bradley_terry_stays_finite_far_out():
    chosen = torch.tensor([-1e4], requires_grad=True)
    loss = ops.bradley_terry(chosen, torch.tensor([1e4]))
    loss.sum().backward()
    assert loss.item() == pytest.approx(2e4) and chosen.grad is not None and chosen.grad.item() == pytest.approx(-1)


def test_a_margin_of_another_shape_is_refused_not_broadcast_to_a_matrix():
    with pytest.raises(TypeCheckError):
        ops.bradley_terry(torch.zeros(4), torch.zeros(4), torch.zeros(4, 1))


def test_averaged_losers_hand_computed():
    """Winner 1, losers 0 and −1: −log σ(1 − (−½)) = 0.201413."""
    rows = ranked([0, 0, 0], [0, 1, 1])
    losses = ops.averaged_losers_loss(torch.tensor([1.0, 0.0, -1.0]), rows.preferred())
    assert losses.tolist() == pytest.approx([0.201413, 0, 0], abs=1e-6)
    assert mean(rows, losses, rows.preferred().any(1)) == pytest.approx(0.201413, abs=1e-6)


def test_with_one_loser_both_ranking_losses_are_bradley_terry():
    rows = ranked([0, 0, 1, 1], [0, 1, 1, 0])
    scores = torch.tensor([0.2, -0.4, 1.5, 0.1])
    pairs = ops.bradley_terry(torch.tensor([0.2, 0.1]), torch.tensor([-0.4, 1.5]))
    for loss in (ops.averaged_losers_loss, ops.pairwise_ranking_loss):
        per_row = loss(scores, rows.preferred())
        assert mean(rows, per_row, rows.preferred().any(1)) == pytest.approx(float(pairs.mean()), abs=1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_pairwise_ranking_loss_is_the_mean_over_the_literal_pairs(seed: int):
    """One comparison of five answers, ties among them: every pair that has a winner counts the same."""
    g = torch.Generator().manual_seed(seed)
    scores = torch.randn(5, generator=g)
    ranks = torch.randint(3, (5,), generator=g).tolist()
    ranks[0], ranks[1] = 0, 1
    pairs = [
        (scores[i].item(), scores[j].item()) for i, j in itertools.permutations(range(5), 2) if ranks[i] < ranks[j]
    ]
    rows = ranked([0] * 5, ranks)
    losses = ops.pairwise_ranking_loss(scores, rows.preferred())
    expected = sum(-log_sigmoid(w - lo) for w, lo in pairs) / len(pairs)
    assert mean(rows, losses, rows.preferred().sum(1)) == pytest.approx(expected, abs=1e-5)
    right = ops.ranking_accuracy(scores, rows.preferred())
    share = sum(w > lo for w, lo in pairs) / len(pairs)
    assert mean(rows, right, rows.preferred().sum(1)) == pytest.approx(share, abs=1e-6)


def test_answers_of_different_questions_are_never_compared():
    preferred = ranked([0, 0, 1, 1], [0, 1, 0, 1]).preferred()
    assert preferred.nonzero().tolist() == [[0, 1], [2, 3]]


def test_a_tied_score_is_not_a_correct_answer_and_a_tied_rank_is_no_pair():
    rows = ranked([0, 0, 0], [0, 1, 1])
    assert ops.ranking_accuracy(torch.tensor([1.0, 1.0, 0.0]), rows.preferred()).tolist() == [1, 0, 0]
    tied = ranked([0, 0], [0, 0])
    assert ops.ranking_accuracy(torch.tensor([1.0, 0.0]), tied.preferred()).tolist() == [0, 0]
    assert ops.pairwise_ranking_loss(torch.tensor([1.0, 0.0]), tied.preferred()).tolist() == [0, 0]


def test_every_winner_is_pulled_up_and_every_loser_down():
    rows = ranked([0, 0, 0], [0, 1, 2])
    for loss in (ops.pairwise_ranking_loss, ops.averaged_losers_loss):
        scores = torch.zeros(3, requires_grad=True)
        loss(scores, rows.preferred()).sum().backward()
        assert scores.grad is not None
        assert scores.grad[0] < 0 < scores.grad[2]
        assert scores.grad.sum().item() == pytest.approx(0, abs=1e-6)


@pytest.mark.skipif(not VECTORS.exists(), reason="the recorded numbers are not here")
def test_pairwise_loss_recorded():
    cases = [c for c in json.loads((VECTORS / "reward_losses.json").read_text()) if c["loss"] == "pairwise"]
    assert cases
    for case in cases:
        chosen, rejected = (torch.tensor(case[k], dtype=torch.float64) for k in ("chosen", "rejected"))
        margin = torch.tensor(case["margin"] or [0.0] * len(chosen), dtype=torch.float64)
        assert float(ops.bradley_terry(chosen, rejected, margin).mean()) == pytest.approx(case["expected"], rel=1e-6)


def test_plackett_luce_hand_computed():
    """Scores 1, 0, −1 in this order: e/(e + 1 + 1/e) first, then 1/(1 + 1/e); the last place follows."""
    rows = ranked([0, 0, 0], [0, 1, 2])
    no_better = rows.together() & (rows.rank[:, None] <= rows.rank[None, :])
    losses = ops.plackett_luce_loss(torch.tensor([1.0, 0.0, -1.0]), rows.preferred(), no_better)
    e = math.e
    assert losses.tolist() == pytest.approx([-math.log(e / (e + 1 + 1 / e)), -math.log(1 / (1 + 1 / e)), 0], abs=1e-6)


def test_plackett_luce_is_a_probability_over_all_orders():
    scores = torch.tensor([0.3, -1.2, 0.9, 0.1])
    total = 0.0
    for order in itertools.permutations(range(4)):
        rows = ranked([0] * 4, list(order))
        no_better = rows.together() & (rows.rank[:, None] <= rows.rank[None, :])
        total += math.exp(-float(ops.plackett_luce_loss(scores, rows.preferred(), no_better).sum()))
    assert total == pytest.approx(1.0, abs=1e-5)


def test_with_two_answers_plackett_luce_is_bradley_terry():
    rows = ranked([0, 0], [1, 0])
    no_better = rows.together() & (rows.rank[:, None] <= rows.rank[None, :])
    scores = torch.tensor([0.4, -0.3])
    expected = ops.bradley_terry(scores[1:], scores[:1])
    assert float(ops.plackett_luce_loss(scores, rows.preferred(), no_better).sum()) == pytest.approx(float(expected))


def test_soft_labels_and_ties():
    """A target of ½ is least at equal scores, log 2, with gradient 0; a target t is least where σ(d) = t."""
    d = torch.zeros(1, requires_grad=True)
    loss = ops.bradley_terry(d, torch.zeros(1), target=0.5)
    loss.sum().backward()
    assert loss.item() == pytest.approx(0.693147, abs=1e-6) and d.grad is not None and d.grad.item() == 0
    at = torch.tensor([math.log(0.8 / 0.2)], requires_grad=True)
    ops.bradley_terry(at, torch.zeros(1), target=0.8).sum().backward()
    assert at.grad is not None and at.grad.item() == pytest.approx(0, abs=1e-6)


def test_ties_make_one_pair_each_where_they_say_something():
    rows = ranked([0, 0, 0, 1, 1], [0, 1, 1, 0, 0])
    assert rows.pairs().nonzero().tolist() == [[0, 1], [0, 2]]
    said = replace(rows, ties=True)
    assert said.pairs().nonzero().tolist() == [[0, 1], [0, 2], [1, 2], [3, 4]]
    assert said.targets()[1, 2] == 0.5 and said.targets()[0, 1] == 1.0
    assert said.targets(0.1)[0, 1] == pytest.approx(0.9) and said.targets(0.1)[1, 2] == 0.5
    assert rows.weights().main[3:].tolist() == [0, 0]
    assert said.weights().main.tolist() == pytest.approx([0.6] * 3 + [0.4] * 2)
