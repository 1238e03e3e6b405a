"""A reward model as a reward source."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from plaudit.learner import Scorer
from plaudit.models.network import text_scores
from plaudit.types import Rollout


class ModelReward:
    """Scores answers with a reward model that reads the policy's own tokens (one vocabulary for both)."""

    def __init__(self, scorer: Scorer):
        self.scorer = scorer

    def score(self, rollout: Rollout) -> Float[Tensor, " B"]:
        return self.scorer.evaluate(rollout, text_scores)
