"""The prompts of the benchmarks: the same for every system. Knows nothing of any of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

#: new tokens an answer may have, and the prompts' lengths
SHAPES = {"fixed": (32, (16, 16)), "ragged": (48, (4, 64))}
PROMPTS = 16
EPOCHS = 4


def openings(tokenizer: Any, count: int, shape: str = "fixed") -> Callable[[int], list[list[int]]]:
    """For every round (from −1 on) the beginnings of ``count`` film reviews, as token ids of the shape's lengths."""
    from plaudit.data import reviews

    low, high = SHAPES[shape][1]
    texts = [ids for ids in (tokenizer.text_ids(r.text) for r in reviews.reviews(0)[:2000]) if len(ids) > high]

    def of(number: int) -> list[list[int]]:
        draw = random.Random(f"{shape} {number}")
        chosen = (texts[(count * (number + 1) + i) % len(texts)] for i in range(count))
        return [ids[: draw.randint(low, high)] for ids in chosen]

    return of


def unread(count: int, shape: str = "fixed") -> Callable[[int], list[list[int]]]:
    """The same from tokens at random, for models that cannot read."""
    low, high = SHAPES[shape][1]

    def of(number: int) -> list[list[int]]:
        draw = random.Random(f"{shape} {number}")
        return [[draw.randrange(1000, 40000) for _ in range(draw.randint(low, high))] for _ in range(count)]

    return of
