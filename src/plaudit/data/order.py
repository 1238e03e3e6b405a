"""In which order rows are taken."""

from __future__ import annotations

import torch


def shuffled(count: int, seed: int, epoch: int) -> list[int]:
    """0 … count−1 in an order that depends on seed and epoch alone, so that a resumed run takes the same rows."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed * 1000 + epoch)).tolist()
