"""What a reward model has to beat on held-out preferences: the longer text wins, and bag-of-words Bradley–Terry."""

from __future__ import annotations

from collections.abc import Sequence

from plaudit.types import Preference


def _pairs(preferences: Sequence[Preference]) -> list[tuple[str, str]]:
    """(preferred, other) texts of every ordered pair."""
    return [
        (a.text, b.text)
        for p in preferences
        for a, i in zip(p.comparison.answers, p.ranks, strict=True)
        for b, j in zip(p.comparison.answers, p.ranks, strict=True)
        if i < j
    ]


def longer_wins(held_out: Sequence[Preference]) -> float:
    """Accuracy of preferring the longer text, in characters; equal lengths count half."""
    pairs = _pairs(held_out)
    return sum((len(a) > len(b)) + 0.5 * (len(a) == len(b)) for a, b in pairs) / max(1, len(pairs))


def bag_of_words(train: Sequence[Preference], held_out: Sequence[Preference], most: int = 20000) -> float | None:
    """Held-out accuracy of logistic regression on the difference of two texts' word counts; None without scikit-learn.

    At most ``most`` training pairs are used, spread evenly.
    """
    try:
        from scipy.sparse import vstack
        from sklearn.feature_extraction.text import CountVectorizer
        from sklearn.linear_model import LogisticRegression
    except ImportError:
        return None
    pairs = _pairs(train)
    pairs = pairs[:: max(1, len(pairs) // most)]
    unseen = _pairs(held_out)
    if not pairs or not unseen:
        return None
    words = CountVectorizer(min_df=2, binary=True, token_pattern=r"(?u)\b\w+\b")
    try:
        words.fit({text for pair in pairs for text in pair})
    except ValueError:
        return None
    difference = words.transform([a for a, _ in pairs]) - words.transform([b for _, b in pairs])
    model = LogisticRegression(fit_intercept=False, max_iter=300)
    model.fit(vstack([difference, -difference]), [1] * len(pairs) + [0] * len(pairs))
    margin = model.decision_function(words.transform([a for a, _ in unseen]) - words.transform([b for _, b in unseen]))
    return float((margin > 0).mean())
