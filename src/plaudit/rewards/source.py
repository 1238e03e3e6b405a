"""What a reward source is, and what a judge makes of its scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from plaudit.types import Rollout


class RewardSource(Protocol):
    def score(self, rollout: Rollout) -> Float[Tensor, " B"]:
        """One finite score an answer, in the rows' order."""
        ...


@runtime_checkable
class DenseSource(RewardSource, Protocol):
    def prefix_scores(self, rollout: Rollout) -> Float[Tensor, "B S"]:
        """The score of each prefix that ends in a chosen token of text; 0 elsewhere."""
        ...


@dataclass(frozen=True)
class Judgement:
    """The sum of all sources' scores (B,), each source's own before any weight, and (for a dense reward) the score of
    every prefix (B, S), zeros otherwise."""

    scores: Float[Tensor, " B"]
    sources: dict[str, Float[Tensor, " B"]]
    prefix_scores: Float[Tensor, "B S"]
