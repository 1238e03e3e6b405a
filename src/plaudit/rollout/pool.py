"""The experience pool: rollouts that serve more than one iteration, bounded in number and in age."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from plaudit.errors import RunError
from plaudit.types import Experience


class Pool:
    """The newest rollouts, of which minibatches are drawn. With one rollout kept this is on-policy PPO, to the bit."""

    def __init__(self, size: int = 1, max_age: int = 0):
        self.size, self.max_age = size, max_age
        self.kept: list[Experience] = []

    def add(self, experience: Experience, version: int) -> None:
        """Takes in a rollout of the present policy ``version``; what is too old, or one too many, goes."""
        young = [e for e in self.kept if version - int(e.version.max()) <= self.max_age]
        self.kept = [*young, experience][-self.size :]

    def minibatches(self, epochs: int, parts: int, generator: torch.Generator) -> Iterator[Experience]:
        """For each epoch as many rows as the newest rollout has, drawn from all that is kept, in ``parts`` parts of
        nearly equal size."""
        together = Experience.cat(self.kept)
        count = len(self.kept[-1])
        for _ in range(epochs):
            order = torch.randperm(len(together), generator=generator)[:count]
            for index in order.tensor_split(min(parts, count)):
                yield together.take(index)

    def state(self) -> dict[str, Tensor]:
        """Everything kept, as named tensors, for a checkpoint. Copies: fields may share memory, files may not."""
        return {f"{i}.{n}": x.clone() for i, e in enumerate(self.kept) for n, x in e._tensors().items()}

    def load_state(self, state: dict[str, Tensor], reduction) -> None:
        """The inverse of :meth:`state`."""
        self.kept = []
        for i in range(1 + max((int(name.split(".")[0]) for name in state), default=-1)):
            fields = {name.split(".", 1)[1]: x for name, x in state.items() if name.startswith(f"{i}.")}
            try:
                self.kept.append(Experience(**fields, reduction=reduction))
            except TypeError:
                raise RunError(
                    "the checkpoint's experience was kept by another version of Plaudit; start anew with another out=…"
                ) from None
