"""What judges a rollout: one source, or several whose weighted scores are added up; and an ensemble as one source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from plaudit import ops
from plaudit.errors import ConfigError
from plaudit.rewards.source import DenseSource, Judgement, RewardSource
from plaudit.types import Rollout


class Ensemble:
    """Several reward models as one source: their mean, the mean less some deviations, or the worst of them.

    The deviation over members is the biased one. Coste et al. 2024.
    """

    def __init__(
        self, members: Sequence[RewardSource], combine: Literal["mean", "lower", "worst"] = "mean", coef: float = 1.0
    ):
        self.members, self.combine, self.coef = members, combine, coef

    def score(self, rollout: Rollout) -> Float[Tensor, " B"]:
        scores = torch.stack([member.score(rollout) for member in self.members])
        match self.combine:
            case "mean":
                return scores.mean(0)
            case "lower":
                return scores.mean(0) - self.coef * scores.std(0, unbiased=False)
            case "worst":
                return scores.amin(0)


@dataclass
class Voice:
    """One source among several: what its score counts, its limit, and its own running moments if it is normalised."""

    name: str
    source: RewardSource
    weight: float = 1.0
    clip: float = 0.0
    moments: ops.Moments | None = None

    def heard(self, scores: Float[Tensor, " B"]) -> Float[Tensor, " B"]:
        """Its part of the sum. Moments take in the batch first, so that the first one is normalised too."""
        if self.moments is not None:
            self.moments = self.moments.merged(scores)
            scores = self.moments.normalise(scores)
        if self.clip:
            scores = scores.clamp(-self.clip, self.clip)
        return self.weight * scores


@dataclass
class Judge:
    """The weighted sum of several voices; ``dense`` asks the first for the score of every prefix too.

    Raises:
        ConfigError: ``dense``, and the first source cannot tell prefixes apart.
    """

    voices: list[Voice]
    dense: bool = False

    def __post_init__(self) -> None:
        if self.dense and not isinstance(self.voices[0].source, DenseSource):
            raise ConfigError("dense_reward needs a reward model; a function scores whole answers only")

    def judge(self, rollout: Rollout) -> Judgement:
        raw = {v.name: v.source.score(rollout) for v in self.voices}
        total = torch.stack([v.heard(raw[v.name]) for v in self.voices]).sum(0)
        prefix = torch.zeros_like(rollout.logprobs)
        first = self.voices[0]
        if self.dense and isinstance(first.source, DenseSource):
            prefix = first.weight * first.source.prefix_scores(rollout)
        return Judgement(total, raw, prefix)

    def state(self) -> dict[str, Tensor]:
        """The running moments, for a checkpoint."""
        return {v.name: v.moments.tensor() for v in self.voices if v.moments is not None}

    def load_state(self, state: dict[str, Tensor]) -> None:
        for voice in self.voices:
            if voice.moments is not None and voice.name in state:
                voice.moments = ops.Moments(*state[voice.name].tolist())
