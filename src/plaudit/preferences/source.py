"""People, judges and programmes are the same thing to the store: they rank the answers of a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from plaudit.types import Comparison


class PreferenceSource(Protocol):
    name: str

    def label(self, comparisons: Sequence[Comparison]) -> list[tuple[int, ...]]:
        """The ranks of each comparison's answers, 0 the best, equal ranks a tie."""
        ...
