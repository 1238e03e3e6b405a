"""KL estimators: their numbers, what they estimate, and that charging for KL lowers it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plaudit import ops
from plaudit.ops import KLEstimator

LOGPROBS, REF_LOGPROBS = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0])


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [("k1", [0.5, -1.0]), ("k2", [0.125, 0.5]), ("k3", [0.106531, 0.718282]), ("abs", [0.5, 1.0])],
)
def test_hand_computed_numbers(estimator: KLEstimator, expected: list[float]):
    assert ops.kl_estimate(LOGPROBS, REF_LOGPROBS, estimator).tolist() == pytest.approx(expected, abs=1e-6)


def test_k1_is_the_default_and_may_be_negative_in_the_mean():
    mask = torch.tensor([True, True])
    assert float(ops.masked_mean(ops.kl_estimate(LOGPROBS, REF_LOGPROBS), mask)) == pytest.approx(-0.25)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_unbiased_estimators_have_the_kl_divergence_as_their_mean(estimator: KLEstimator):
    g = torch.Generator().manual_seed(0)
    logp, logq = torch.log_softmax(torch.randn(2, 11, generator=g, dtype=torch.float64), -1)
    exact = torch.nn.functional.kl_div(logq, logp, log_target=True, reduction="sum")
    assert float((logp.exp() * ops.kl_estimate(logp, logq, estimator)).sum()) == pytest.approx(float(exact))


@given(st.floats(-30, 0), st.floats(-30, 0))
def test_k2_k3_and_abs_are_never_negative_and_zero_where_the_policies_agree(logprob: float, ref_logprob: float):
    mine, theirs = torch.tensor([logprob]), torch.tensor([ref_logprob])
    for estimator in ("k2", "k3", "abs"):
        # One rounding of d, the last operation of k3, is all that may be missing.
        assert float(ops.kl_estimate(mine, theirs, estimator)) >= -1.2e-7 * abs(logprob - ref_logprob)
        assert float(ops.kl_estimate(mine, mine, estimator)) == 0


def test_sequence_kl_is_the_sum_over_chosen_tokens():
    mask = torch.tensor([[True, False, True], [False, False, False]])
    logprobs, ref_logprobs = torch.tensor([[-1.0, 9.0, -2.0]] * 2), torch.tensor([[-1.5, -9.0, -1.0]] * 2)
    assert ops.sequence_kl(logprobs, ref_logprobs, mask).tolist() == [-0.5, 0.0]


def test_one_step_on_the_price_of_kl_alone_lowers_the_kl():
    """A policy over five tokens that is not its reference, no score: its exact expected update must bring it nearer."""
    g = torch.Generator().manual_seed(1)
    start, ref = torch.randn(2, 5, generator=g, dtype=torch.float64)
    ref_logprobs = torch.log_softmax(ref, -1)
    old = torch.log_softmax(start, -1)
    kl = float((old.exp() * (old - ref_logprobs)).sum())

    # Every action is a response of one token, weighted by its probability: the expectation without sampling.
    mask = torch.ones(5, 1, dtype=torch.bool)
    scores = torch.zeros(5, dtype=torch.float64)
    rewards = ops.token_rewards(scores, old[:, None], ref_logprobs[:, None], mask, kl_coef=1.0)
    advantages, _ = ops.gae(rewards, torch.zeros_like(rewards), mask)
    theta = start.clone().requires_grad_(True)
    logprobs = torch.log_softmax(theta, -1)
    (old.exp() * ops.policy_loss(logprobs, old, advantages[:, 0])).sum().backward()
    assert theta.grad is not None
    after = torch.log_softmax(start - 0.01 * theta.grad, -1)
    assert float((after.exp() * (after - ref_logprobs)).sum()) < kl - 1e-5
