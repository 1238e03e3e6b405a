"""Supervised fine-tuning: the negative log-likelihood of the supervised tokens."""

from __future__ import annotations

from torch import Tensor

from plaudit.learner import Loss, Stats, weighted
from plaudit.models.network import Outputs, token_policy
from plaudit.types import Sequences, Weights


def sft_loss(outputs: Outputs, rows: Sequences, weights: Weights) -> tuple[Tensor, Stats]:
    """Mean of −log π(tok_s | tok_<s) over the supervised tokens, in nats."""
    logprobs, entropy = token_policy(outputs, rows)
    return -(logprobs * weights.main).sum(), weighted(
        {"nll_nats_per_token": -logprobs, "entropy_nats_per_token": entropy}, weights.main
    )


def scaled(loss: Loss, coefficient: float, name: str) -> Loss:
    """``coefficient`` times a loss, to be added to another; what it measured is reported under ``name``."""

    def of(outputs: Outputs, rows: Sequences, weights: Weights) -> tuple[Tensor, Stats]:
        total, stats = loss(outputs, rows, weights)
        return coefficient * total, {f"{name}_{key}": value for key, value in stats.items()}

    return of
