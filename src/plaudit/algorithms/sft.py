"""Supervised fine-tuning: the negative log-likelihood of the supervised tokens."""

from __future__ import annotations

from torch import Tensor

from plaudit.models.network import Outputs, token_policy
from plaudit.types import Sequences


def sft_loss(outputs: Outputs, rows: Sequences) -> tuple[Tensor, dict[str, Tensor]]:
    """−log π(tok_s | tok_<s) per supervised token (B, S), in nats."""
    logprobs, entropy = token_policy(outputs, rows)
    return -logprobs, {"nll": -logprobs, "entropy": entropy}
