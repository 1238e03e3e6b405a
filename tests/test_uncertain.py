"""Asking where an ensemble disagrees saves labels: measured on an annotator with a hidden taste, through the desk."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from plaudit.preferences.desk import Asking, Desk, Said
from plaudit.preferences.store import PreferenceStore
from plaudit.types import Answer, Comparison

FEATURES, MEMBERS, A_ROUND, GOAL = 10, 5, 8, 0.95


class Taste:
    """An annotator who weighs the features of an answer; answers are told apart by their texts."""

    def __init__(self, seed: int):
        self.draws = np.random.default_rng(seed)
        self.weights = self.draws.normal(size=FEATURES)
        self.features: dict[str, np.ndarray] = {}

    def answer(self, name: str) -> Answer:
        self.features[name] = self.draws.normal(size=FEATURES)
        return Answer(name)

    def prefers(self, first: str, second: str) -> bool:
        return bool((self.features[first] - self.features[second]) @ self.weights > 0)

    def fitted(self, labels: list[tuple[str, str]]) -> np.ndarray:
        """Logistic regression on (winner, loser) pairs with a prior, by gradient steps: (FEATURES,)."""
        x = np.array([self.features[w] - self.features[loser] for w, loser in labels])
        w = np.zeros(FEATURES)
        for _ in range(60):
            w += 0.5 * (x.T @ (1 / (1 + np.exp(x @ w))) / len(x) - 0.01 * w)
        return w

    def accuracy(self, w: np.ndarray) -> float:
        found = np.random.default_rng(9).normal(size=(2000, FEATURES))
        return float(np.mean((found @ w > 0) == (found @ self.weights > 0)))


def labels_needed(path: Path, seed: int, uncertain: bool) -> int:
    """Labels after which the mean of the ensemble predicts 95 of 100 of the annotator's choices."""
    taste = Taste(seed)
    store = PreferenceStore(path, create=True)
    store.add([Comparison(0, f"p{i}", (taste.answer(f"{i}a"), taste.answer(f"{i}b"))) for i in range(300)])
    desk = Desk(store, Asking("compare", 1, 0, 0))
    draws = np.random.default_rng(seed)
    said: list[tuple[str, str]] = []
    while len(said) < 300:
        for _ in range(A_ROUND):
            asked = desk.next("ann")
            assert asked is not None
            first, second = (a.text for a in asked.answers)
            better = taste.prefers(first, second)
            places = (0, 1) if better else (1, 0)
            desk.answer("ann", asked.key, lambda _, places=places: Said("ranked", places))
            said.append((first, second) if better else (second, first))
        members = [taste.fitted([said[i] for i in draws.integers(len(said), size=len(said))]) for _ in range(MEMBERS)]
        if taste.accuracy(taste.fitted(said)) >= GOAL:
            break
        if uncertain:
            scores = {
                number: [[float(taste.features[a] @ w) for a in answers] for w in members]
                for number, _, answers in desk.open_questions()
            }
            desk.ask_first(scores)
    store.close()
    return len(said)


def test_fewer_labels_reach_the_same_accuracy(tmp_path):
    needed = {
        way: [labels_needed(tmp_path / f"{way}{seed}.sqlite", seed, way == "uncertain") for seed in range(8)]
        for way in ("random", "uncertain")
    }
    random, uncertain = (sum(n) / len(n) for n in needed.values())
    print(needed)
    assert uncertain < 0.9 * random
