"""What an engine is: it answers prompts, and takes over the actor's weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from plaudit.config import SamplingConfig
from plaudit.types import Prompt, Rollout


class RolloutEngine(Protocol):
    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingConfig,
        *,
        seed: int,
        progress: Callable[[int], None] | None = None,
    ) -> Rollout:
        """One answer a prompt, in the order of the prompts. The same seed and weights give the same answers.

        ``progress`` is told from time to time how many answers are done.
        """
        ...

    def load(self, version: int) -> None:
        """Takes over the actor's present weights; later answers carry ``version``."""
        ...
