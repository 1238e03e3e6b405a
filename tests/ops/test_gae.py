"""Generalised advantage estimation against its definition: the λ-weighted mean of all n-step advantages."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from plaudit import ops


def n_step(rewards: list[float], values: list[float], t: int, n: int, gamma: float) -> float:
    """r_t + γ r_{t+1} + … + γ^{n−1} r_{t+n−1} + γ^n V(s_{t+n}) − V(s_t); ``values`` has one entry more than rewards."""
    return sum(gamma**k * rewards[t + k] for k in range(n)) + gamma**n * values[t + n] - values[t]


def literal(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """(1 − λ) Σ_n λ^{n−1} A^(n), the longest n taking the whole remaining weight."""
    advantages = []
    for t in range(len(rewards)):
        longest = len(rewards) - t
        terms = [(1 - lam) * lam ** (n - 1) * n_step(rewards, values, t, n, gamma) for n in range(1, longest)]
        advantages.append(sum(terms) + lam ** (longest - 1) * n_step(rewards, values, t, longest, gamma))
    return advantages


def random_rows(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor, torch.Generator]:
    """rewards, values, a mask with holes (one row without a chosen token), bootstrap."""
    g = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, 5, 9, generator=g, dtype=torch.float64)
    mask = torch.rand(5, 9, generator=g) < 0.6
    mask[2] = False
    return rewards, values, mask, torch.randn(5, generator=g, dtype=torch.float64), g


@pytest.mark.parametrize("bootstrapped", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_is_the_weighted_mean_of_all_n_step_advantages(seed: int, bootstrapped: bool):
    rewards, values, mask, bootstrap, g = random_rows(seed)
    gamma, lam = torch.rand(2, generator=g).tolist()
    advantages, returns = ops.gae(
        rewards, values, mask, gamma=gamma, lam=lam, bootstrap=bootstrap if bootstrapped else None
    )
    for b in range(len(rewards)):
        at = mask[b].nonzero().flatten().tolist()
        last = float(bootstrap[b]) if bootstrapped else 0.0
        expected = literal(rewards[b, at].tolist(), [*values[b, at].tolist(), last], gamma, lam)
        assert advantages[b, at].tolist() == pytest.approx(expected, abs=1e-12)
        assert returns[b, at].tolist() == pytest.approx((advantages[b, at] + values[b, at]).tolist(), abs=1e-12)
    assert (advantages[~mask] == 0).all() and (returns[~mask] == 0).all()


def test_lambda_zero_is_the_one_step_form():
    rewards, values, mask, _, _ = random_rows(1)
    advantages, _ = ops.gae(rewards, values, mask, gamma=0.9, lam=0.0)
    for b in range(len(rewards)):
        at = mask[b].nonzero().flatten().tolist()
        for i, s in enumerate(at):
            ahead = 0.9 * values[b, at[i + 1]].item() if i + 1 < len(at) else 0.0
            assert advantages[b, s].item() == pytest.approx(rewards[b, s].item() + ahead - values[b, s].item())


def test_lambda_one_returns_are_the_discounted_rewards_to_go_whatever_the_values():
    rewards, values, mask, _, _ = random_rows(2)
    _, returns = ops.gae(rewards, values, mask, gamma=0.9, lam=1.0)
    _, others = ops.gae(rewards, torch.zeros_like(values), mask, gamma=0.9, lam=1.0)
    assert torch.allclose(returns, others, atol=1e-12)
    for b in range(len(rewards)):
        at = mask[b].nonzero().flatten().tolist()
        for i, s in enumerate(at):
            to_go = sum(0.9**k * rewards[b, u].item() for k, u in enumerate(at[i:]))
            assert returns[b, s].item() == pytest.approx(to_go)


@pytest.mark.parametrize("padding", [[], [7.0]])
def test_hand_computed_row_with_and_without_a_padded_place(padding: list[float]):
    rewards = torch.tensor([[0.0, 0.0, 1.0, *[0.0 for _ in padding]]])
    values = torch.tensor([[0.5, 0.5, 0.5, *padding]])
    mask = torch.tensor([[True, True, True, *[False for _ in padding]]])
    advantages, returns = ops.gae(rewards, values, mask, gamma=1.0, lam=0.95)
    assert advantages[0, :3].tolist() == pytest.approx([0.45125, 0.475, 0.5])
    assert returns[0, :3].tolist() == pytest.approx([0.95125, 0.975, 1.0])


def test_bootstrap_continues_a_row_like_one_more_state_of_that_value():
    """Cutting a row and bootstrapping with V(s_T) gives what the longer row gives when nothing more is paid there."""
    rewards, values = torch.tensor([[0.3, -0.2]]), torch.tensor([[0.1, 0.4]])
    mask = torch.ones(1, 2, dtype=torch.bool)
    cut, _ = ops.gae(rewards, values, mask, gamma=0.9, lam=0.8, bootstrap=torch.tensor([0.7]))
    # One more token that pays exactly its own value has δ = 0, so only its value reaches back.
    longer, _ = ops.gae(
        torch.tensor([[0.3, -0.2, 0.7]]), torch.tensor([[0.1, 0.4, 0.7]]), torch.ones(1, 3, dtype=torch.bool),
        gamma=0.9, lam=0.8,
    )  # fmt: skip
    assert cut[0].tolist() == pytest.approx(longer[0, :2].tolist())
