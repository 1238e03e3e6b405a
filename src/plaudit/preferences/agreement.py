"""Do people agree, with each other and with themselves? Figures over the labels of a store.

Every label is taken apart into pairs: of two answers the first is better (−1), the second (1), or they are alike (0).
The coefficients are those of statsmodels and krippendorff; here is what they are asked about.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from plaudit.ops import wilson_interval

#: what is said of a pair
CHOICES = (-1, 0, 1)


@dataclass(frozen=True)
class Label:
    """One label as agreement sees it; ``shown`` are the answers' indices in the order shown, as ``ranks`` has them.
    ``ranks`` is empty where it was skipped."""

    question: int
    annotator: str
    ranks: tuple[int, ...]
    shown: tuple[int, ...]
    kind: str = "label"
    known: tuple[int, ...] | None = None
    seconds: float = 0.0
    created: str = ""

    @property
    def skipped(self) -> bool:
        return not self.ranks


@dataclass(frozen=True)
class Share:
    """A share with Wilson's 95 % interval; ``value`` is None where nothing was counted."""

    value: float | None
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, hits: float, count: int) -> Share:
        low, high = wilson_interval(hits, count)
        return cls(hits / count if count else None, low, high, count)


@dataclass(frozen=True)
class Agreement:
    """``kappa``: Cohen's for each two people with common pairs. ``fleiss``: over the pairs that the most usual number
    of people judged. ``alpha``: Krippendorff's, ordinal, over all. None where too little overlaps. ``agree``: how often
    two people say the same of a pair. ``first``: how often the answer shown first wins, where one wins (½: no bias).
    ``again``: how often people say the same of a question when asked again. ``attentive``: checks passed."""

    kappa: dict[tuple[str, str], float | None]
    fleiss: float | None
    alpha: float | None
    agree: Share
    first: Share
    again: Share
    attentive: Share


def pairs(label: Label) -> Iterator[tuple[tuple[int, int, int], int]]:
    """((question, i, j), −1 | 0 | 1) for every two answers."""
    for i, j in combinations(range(len(label.ranks)), 2):
        yield (label.question, i, j), _sign(label.ranks[i] - label.ranks[j])


def agreement(labels: Sequence[Label]) -> Agreement:
    votes = _votes(labels)
    people = sorted({person for said in votes for person in said})
    several = [said for said in votes if len(said) > 1]
    return Agreement(
        kappa={(a, b): _cohen(votes, a, b) for a, b in combinations(people, 2) if _common(votes, a, b)},
        fleiss=_fleiss(several),
        alpha=_alpha(several, people),
        agree=agree(labels),
        first=_first(labels),
        again=asked_again(labels),
        attentive=attentive(labels),
    )


def agree(labels: Sequence[Label]) -> Share:
    """How often two people say the same of a pair."""
    same = total = 0
    for said in _votes(labels):
        for a, b in combinations(said.values(), 2):
            same, total = same + (a == b), total + 1
    return Share.of(same, total)


def _votes(labels: Sequence[Label]) -> list[dict[str, int]]:
    """For each pair that anybody judged: person -> what they said."""
    said: dict[tuple[int, int, int], dict[str, int]] = {}
    for label in labels:
        if label.kind == "label":
            for pair, choice in pairs(label):
                said.setdefault(pair, {})[label.annotator] = choice
    return list(said.values())


def _common(votes: Sequence[dict[str, int]], a: str, b: str) -> list[tuple[int, int]]:
    return [(v[a], v[b]) for v in votes if a in v and b in v]


def _cohen(votes: Sequence[dict[str, int]], a: str, b: str) -> float | None:
    from statsmodels.stats.inter_rater import cohens_kappa

    common = _common(votes, a, b)
    table = np.array([[common.count((x, y)) for y in CHOICES] for x in CHOICES])
    # where both always say the same one thing, chance explains all of it
    expected = (table.sum(0) @ table.sum(1)) / len(common) ** 2
    return float(cohens_kappa(table, return_results=False)) if expected < 1 else None


def _fleiss(several: Sequence[dict[str, int]]) -> float | None:
    from statsmodels.stats.inter_rater import fleiss_kappa

    if not several:
        return None
    usual = Counter(map(len, several)).most_common(1)[0][0]
    table = np.array([[list(v.values()).count(x) for x in CHOICES] for v in several if len(v) == usual])
    return float(fleiss_kappa(table)) if (table.sum(0) > 0).sum() > 1 else None


def _alpha(several: Sequence[dict[str, int]], people: Sequence[str]) -> float | None:
    import krippendorff

    values = [[votes.get(person, np.nan) for votes in several] for person in people]
    if len({choice for votes in several for choice in votes.values()}) < 2:
        return None
    return float(krippendorff.alpha(np.array(values, dtype=float), level_of_measurement="ordinal"))


def _first(labels: Sequence[Label]) -> Share:
    wins = count = 0
    for label in labels:
        if label.kind == "label" and len(label.ranks) == 2 and label.ranks[0] != label.ranks[1]:
            count += 1
            wins += label.ranks[label.shown[0]] == 0
    return Share.of(wins, count)


def asked_again(labels: Sequence[Label]) -> Share:
    """How often people say the same of a question when asked again."""
    once = {(label.question, label.annotator): label.ranks for label in labels if label.kind == "label"}
    twice = [
        (label.ranks, once[key])
        for label in labels
        if label.kind == "repeat" and (key := (label.question, label.annotator)) in once
    ]
    return Share.of(sum(a == b for a, b in twice), len(twice))


def attentive(labels: Sequence[Label]) -> Share:
    """How many attention checks were answered as known."""
    checked = [label for label in labels if label.kind == "check" and label.known is not None]
    return Share.of(sum(label.ranks == label.known for label in checked), len(checked))


def _sign(x: int) -> int:
    return (x > 0) - (x < 0)
