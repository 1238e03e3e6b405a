"""Which question comes first, and in which order its answers are shown: both drawn by a hash, so that they can be told
again. And where an ensemble of reward models is least sure."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from itertools import combinations


def _drawn(*parts: str) -> int:
    return int.from_bytes(hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).digest()[:8])


def priority(fingerprint: str, answers: str = "") -> float:
    """A question's place in the random order, from 0 to 1; the same for everyone, so that people meet."""
    return _drawn("priority", fingerprint, answers) / 2**64


def shown_order(fingerprint: str, answers: Sequence[int], annotator: str, turn: int = 0) -> tuple[int, ...]:
    """The answers as one person sees them; another order for another person, and when asked again (``turn``)."""
    said = (fingerprint, annotator, str(turn))
    return tuple(sorted(answers, key=lambda i: _drawn("shown", *said, str(i))))


def disagreement(scores: Sequence[Sequence[float]]) -> float:
    """How much is to be learned from asking, in nats a pair: mutual information of label and member (BALD).

    ``scores[m][i]`` is member m's score of answer i. For each pair, members say p_m = σ(s_i − s_j); the gain is
    H(mean of p_m) − mean of H(p_m), 0 where all members agree, however unsure. Houlsby et al. 2011; averaged over the
    pairs, 0 without one.
    """
    pairs = list(combinations(range(len(scores[0])), 2))
    gains = []
    for i, j in pairs:
        said = [_sigmoid(member[i] - member[j]) for member in scores]
        gains.append(_entropy(sum(said) / len(said)) - sum(map(_entropy, said)) / len(said))
    return sum(gains) / max(1, len(gains))


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else 1 - 1 / (1 + math.exp(x))


def _entropy(p: float) -> float:
    return -sum(q * math.log(q) for q in (p, 1 - p) if q > 0)
