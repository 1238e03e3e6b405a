"""The prompts of the benchmarks: the same for every system. Knows nothing of any of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

#: new tokens an answer may have, and the prompts' lengths
SHAPES = {"fixed": (32, (16, 16)), "ragged": (48, (4, 64))}
PROMPTS = 16
EPOCHS = 4


def prompts(shape: str, number: int, count: int = PROMPTS) -> list[list[int]]:
    """Token ids of iteration ``number``: words at random, of the middle of the vocabulary."""
    draw = random.Random(f"{shape} {number}")
    low, high = SHAPES[shape][1]
    return [[draw.randrange(1000, 40000) for _ in range(draw.randint(low, high))] for _ in range(count)]


def openings(tokenizer: Any, rows: int, *, tokens: int = 16) -> Callable[[int], list[list[int]]]:
    """For every round (from −1 on) the first tokens of ``rows`` film reviews, which no other round has."""
    from plaudit.data import reviews

    texts = [ids for ids in (tokenizer.text_ids(r.text) for r in reviews.reviews(0)[:2000]) if len(ids) > tokens]
    return lambda number: [ids[:tokens] for ids in texts[rows * (number + 1) : rows * (number + 2)]]
