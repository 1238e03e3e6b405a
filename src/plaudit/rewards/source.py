"""What a reward source is."""

from __future__ import annotations

from typing import Protocol

from jaxtyping import Float
from torch import Tensor

from plaudit.types import Rollout


class RewardSource(Protocol):
    def score(self, rollout: Rollout) -> Float[Tensor, " B"]:
        """One finite score an answer, in the rows' order."""
        ...
