"""People, judges and programmes are the same thing to the store: they rank the answers of a comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from plaudit.types import Comparison, Preference


class PreferenceSource(Protocol):
    name: str

    def label(self, comparisons: Sequence[Comparison], stopped: Callable[[], bool]) -> Iterator[list[Preference]]:
        """What it says of the comparisons, a batch at a time, as it comes. Once ``stopped`` is true it begins nothing
        new, and ends with what is under way."""
        ...
