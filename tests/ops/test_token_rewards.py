"""Where a score is paid and what KL costs."""

from __future__ import annotations

import pytest
import torch

from plaudit import ops
from plaudit.ops import KLEstimator
from plaudit.types import Rollout

END, PAD = 1, 0


def paid(mask: list[list[bool]], scores: list[float]) -> torch.Tensor:
    """Rewards without KL."""
    m = torch.tensor(mask)
    zeros = torch.zeros(m.shape)
    return ops.token_rewards(torch.tensor(scores), zeros, zeros, m, kl_coef=0.0)


def test_score_is_paid_on_the_last_chosen_token_not_at_the_end_of_the_row():
    """Tokens [11, 12, END, PAD, PAD]."""
    assert paid([[True, True, True, False, False]], [1.0]).tolist() == [[0, 0, 1, 0, 0]]


def test_full_unended_row_is_paid_at_its_last_token():
    assert paid([[True] * 5], [1.0]).tolist() == [[0, 0, 0, 0, 1]]


def test_empty_row_is_paid_nothing_and_moves_no_other_row():
    mask = torch.tensor([[True, True, True, False], [False] * 4, [True, True, False, False]])
    logprobs, ref_logprobs = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))

    def advantages(score: float) -> torch.Tensor:
        scores = torch.tensor([1.0, score, -1.0])
        rewards = ops.token_rewards(scores, logprobs, ref_logprobs, mask, kl_coef=0.1)
        assert (rewards[1] == 0).all()
        return ops.whiten(ops.gae(rewards, torch.zeros(3, 4), mask)[0], mask)

    assert torch.equal(advantages(0.0), advantages(10.0))


def test_an_end_token_inside_the_prompt_ends_nothing():
    """Completion [9, 9] unended, score 2, penalty 1; completion [9, END], score 2: paid 1 and 2, on the last token."""
    rollout = Rollout.pack(
        [[5, END, 6, 9, 9], [5, END, 6, 9, END]],
        [[False] * 3 + [True] * 2] * 2,
        logprobs=torch.zeros(2, 5),
        terminated=torch.tensor([False, True]),
        version=torch.zeros(2, dtype=torch.long),
        prompts=(),
    )
    scores = torch.tensor([2.0, 2.0]) - 1.0 * (~rollout.terminated).float()
    zeros = torch.zeros(2, 5)
    rewards = ops.token_rewards(scores, zeros, zeros, rollout.mask, kl_coef=0.0)
    assert rewards.tolist() == [[0, 0, 0, 0, 1], [0, 0, 0, 0, 2]]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs"])
def test_a_row_adds_up_to_its_score_minus_the_price_of_its_kl(estimator: KLEstimator):
    g = torch.Generator().manual_seed(3)
    logprobs, ref_logprobs = torch.randn(2, 4, 7, generator=g, dtype=torch.float64)
    mask = torch.rand(4, 7, generator=g) < 0.7
    mask[:, 2] = True
    scores = torch.randn(4, generator=g, dtype=torch.float64)
    rewards = ops.token_rewards(scores, logprobs, ref_logprobs, mask, kl_coef=0.3, estimator=estimator)
    kl = ops.sequence_kl(logprobs, ref_logprobs, mask, estimator)
    assert torch.allclose(rewards.sum(1), scores - 0.3 * kl)
    assert (rewards[~mask] == 0).all()


def test_kl_is_charged_where_it_is_spent():
    logprobs, ref_logprobs = torch.tensor([[-1.0, -2.0, -1.0]]), torch.tensor([[-1.5, -1.0, -1.0]])
    rewards = ops.token_rewards(
        torch.tensor([3.0]), logprobs, ref_logprobs, torch.ones(1, 3, dtype=torch.bool), kl_coef=0.2
    )
    assert rewards[0].tolist() == pytest.approx([-0.1, 0.2, 3.0])
