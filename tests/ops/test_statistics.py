"""Whitening, the adaptive KL controller and Wilson's interval: recorded numbers and edges."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from plaudit import ops

MASK = torch.tensor([True, True, True, False])
VECTORS = Path(__file__).parents[3] / "shared" / "vectors"


@pytest.mark.parametrize("outsider", [99.0, float("nan"), float("inf")])
@pytest.mark.parametrize(("unbiased", "expected"), [(False, [-1.224745, 0, 1.224745, 0]), (True, [-1, 0, 1, 0])])
def test_whiten_hand_computed_and_deaf_to_what_is_masked(outsider: float, unbiased: bool, expected: list[float]):
    whitened = ops.whiten(torch.tensor([1.0, 2.0, 3.0, outsider]), MASK, unbiased=unbiased)
    assert whitened.tolist() == pytest.approx(expected, abs=1e-6)


def test_whiten_keeping_the_mean():
    whitened = ops.whiten(torch.tensor([1.0, 2.0, 3.0, 99.0]), MASK, keep_mean=True)
    assert whitened.tolist() == pytest.approx([2 - 1.224745, 2, 2 + 1.224745, 0], abs=1e-6)


@pytest.mark.parametrize("unbiased", [False, True])
def test_whiten_of_one_token_is_finite_and_of_none_is_zero(unbiased: bool):
    x = torch.tensor([5.0, 99.0])
    assert ops.whiten(x, torch.tensor([True, False]), unbiased=unbiased).tolist() == [0.0, 0.0]
    assert ops.whiten(x, torch.tensor([False, False]), unbiased=unbiased).tolist() == [0.0, 0.0]


def test_whiten_counts_all_rows_together():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(6, 8, generator=g, dtype=torch.float64) * 3 + torch.arange(6.0)[:, None]
    mask = torch.rand(6, 8, generator=g) < 0.5
    inside = ops.whiten(x, mask)[mask]
    assert float(inside.mean()) == pytest.approx(0, abs=1e-9)
    assert float(inside.std(unbiased=False)) == pytest.approx(1, abs=1e-6)
    assert torch.argsort(inside).tolist() == torch.argsort(x[mask]).tolist()


@pytest.mark.parametrize(("observed", "expected"), [(12.0, 0.201024), (3.0, 0.198976)])
def test_adaptive_kl_hand_computed(observed: float, expected: float):
    coefficient = ops.adaptive_kl_coef(0.2, observed, target=6.0, horizon=10000.0, n=256)
    assert coefficient == pytest.approx(expected, abs=1e-9)


def test_adaptive_kl_rests_at_its_target_and_is_bounded_away_from_it():
    assert ops.adaptive_kl_coef(0.2, 6.0, target=6.0, horizon=100.0, n=10) == 0.2
    assert ops.adaptive_kl_coef(0.2, 1e9, target=6.0, horizon=100.0, n=10) == pytest.approx(0.2 * 1.02)
    assert ops.adaptive_kl_coef(0.2, -1e9, target=6.0, horizon=100.0, n=10) == pytest.approx(0.2 * 0.98)


@pytest.mark.parametrize(("target", "horizon"), [(0.0, 100.0), (-1.0, 100.0), (6.0, 0.0), (6.0, -5.0)])
def test_adaptive_kl_refuses_a_target_or_horizon_that_is_not_positive(target: float, horizon: float):
    with pytest.raises(ValueError, match="positive"):
        ops.adaptive_kl_coef(0.2, 6.0, target=target, horizon=horizon, n=1)


@pytest.mark.skipif(not VECTORS.exists(), reason="the recorded numbers are not here")
def test_adaptive_kl_recorded():
    recorded = json.loads((VECTORS / "adaptive_kl.json").read_text())
    coefficient = recorded["init"]
    for step in recorded["steps"]:
        coefficient = ops.adaptive_kl_coef(
            coefficient, step["current"], target=recorded["target"], horizon=recorded["horizon"], n=step["n_steps"]
        )
        assert coefficient == pytest.approx(step["value"], rel=1e-6)


@pytest.mark.parametrize(
    ("wins", "n", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_interval_as_published(wins: int, n: int, low: float, high: float):
    """Newcombe 1998, "Two-sided confidence intervals for the single proportion", table I, method 3."""
    assert ops.wilson_interval(wins, n, z=1.959964) == pytest.approx((low, high), abs=6e-5)


def test_wilson_interval_is_symmetric_stays_in_the_unit_interval_and_knows_nothing_from_nothing():
    low, high = ops.wilson_interval(7.5, 20)
    mirrored = ops.wilson_interval(12.5, 20)
    assert (1 - high, 1 - low) == pytest.approx(mirrored)
    assert 0.83 < ops.wilson_interval(20, 20)[0] < ops.wilson_interval(20, 20)[1] <= 1.0
    assert ops.wilson_interval(0, 0) == (0.0, 1.0)
