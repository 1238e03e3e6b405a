"""The prompts of the PPO benchmarks: the same for every system. Knows nothing of any of them."""

from __future__ import annotations

import random

#: new tokens an answer may have, and the prompts' lengths
SHAPES = {"fixed": (32, (16, 16)), "ragged": (48, (4, 64))}
PROMPTS = 16
EPOCHS = 4


def prompts(shape: str, number: int) -> list[list[int]]:
    """Token ids of iteration ``number``: words at random, of the middle of the vocabulary."""
    draw = random.Random(f"{shape} {number}")
    low, high = SHAPES[shape][1]
    return [[draw.randrange(1000, 40000) for _ in range(draw.randint(low, high))] for _ in range(PROMPTS)]
