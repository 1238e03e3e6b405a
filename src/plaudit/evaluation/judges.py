"""Judges of film sentences: what share of people would call a text favourable?

The oracle stands in for a person when answers are labelled; the gold judges only ever look at finished answers. They
read disjoint texts: the oracle one half of the IMDB reviews, gold the other half and critics' sentences kept apart.
Left out: language models that judge (see language_judge).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence

from plaudit.data import reviews
from plaudit.errors import DataError
from plaudit.types import Comparison, Preference, ranked

#: texts -> one number a text
Judge = Callable[[Sequence[str]], list[float]]


def _classifier(rated: Sequence[reviews.Rated]) -> Judge:
    """TF-IDF over words and pairs of words, with logistic regression: the probability of a favourable verdict."""
    try:
        from sklearn.feature_extraction.text import HashingVectorizer, TfidfTransformer
        from sklearn.linear_model import LogisticRegression
        from sklearn.pipeline import make_pipeline
    except ImportError:
        raise DataError('this judge needs scikit-learn; run `pip install "plaudit[quickstart]"`') from None
    # Hashed features need no vocabulary in memory, which for pairs of words would be hundreds of megabytes.
    words = HashingVectorizer(ngram_range=(1, 2), n_features=2**20, alternate_sign=False, token_pattern=r"(?u)\b\w+\b")
    tfidf = TfidfTransformer(sublinear_tf=True)
    model = make_pipeline(words, tfidf, LogisticRegression(C=3.0, max_iter=300, solver="liblinear"))
    model.fit([r.text for r in rated], [r.favourable for r in rated])
    return lambda texts: model.predict_proba(list(texts))[:, 1].tolist() if len(texts) else []


@functools.cache
def oracle_judge() -> Judge:
    """The stand-in for a person: trained on the first half of the IMDB reviews."""
    return _classifier(reviews.reviews(0))


@functools.cache
def gold_judge() -> Judge:
    """The judge nobody trains against: the other half of IMDB, and the critics' sentences kept for it."""
    return _classifier(reviews.reviews(1) + reviews.sentences("gold"))


@functools.cache
def vader_judge() -> Judge:
    """VADER's compound sentiment, −1 to 1 (Hutto & Gilbert 2014)."""
    try:
        from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer
    except ImportError:
        raise DataError('this judge needs vaderSentiment; run `pip install "plaudit[quickstart]"`') from None
    analyser = SentimentIntensityAnalyzer()
    return lambda texts: [analyser.polarity_scores(text)["compound"] for text in texts]


class Oracle:
    """A programme in a person's place, and named as one: it ranks answers by the oracle judge."""

    name = "oracle"

    def label(self, comparisons: Sequence[Comparison], stopped: Callable[[], bool]) -> Iterator[list[Preference]]:
        started = time.time()
        judge = oracle_judge()
        labels = []
        for comparison in comparisons:
            said = judge([f"{comparison.prompt}{answer.text}" for answer in comparison.answers])
            labels.append(ranked([-favourable for favourable in said]))
        seconds = (time.time() - started) / max(1, len(labels))
        yield [Preference(c, ranks, self.name, seconds=seconds) for c, ranks in zip(comparisons, labels, strict=True)]
