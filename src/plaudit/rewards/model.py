"""A reward model as a reward source."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from plaudit.learner import Scorer
from plaudit.models.network import prefix_scores, text_scores
from plaudit.types import Rollout


class ModelReward:
    """Scores answers with a reward model that reads the policy's own tokens (one vocabulary for both)."""

    def __init__(self, scorer: Scorer):
        self.scorer = scorer

    def score(self, rollout: Rollout) -> Float[Tensor, " B"]:
        return self.scorer.evaluate(rollout, text_scores)

    def prefix_scores(self, rollout: Rollout) -> Float[Tensor, "B S"]:
        """The score of each prefix that ends in a chosen token of text; 0 elsewhere."""
        return self.scorer.evaluate(rollout, prefix_scores)
