"""Keys and values that generation keeps: allocated once, written in place.

All rows of a batch write the same slot, so a row's tokens end where its neighbours' end; padding stands on the left.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor


class KeyValues:
    """Keys and values of one block, (b, kv heads, slots, D); room for them is taken when the first ones come."""

    def __init__(self, slots: int):
        self.slots, self.used = slots, 0
        self.keys = self.values = torch.empty(0)

    def append(
        self, keys: Float[Tensor, "b h n D"], values: Float[Tensor, "b h n D2"]
    ) -> tuple[Float[Tensor, "b h L D"], Float[Tensor, "b h L D2"]]:
        """Everything in the slots so far, with these behind it."""
        if not self.used:
            self._allocate(len(keys), keys, values)
        end = self.used + keys.shape[2]
        self.keys[:, :, self.used : end] = keys
        self.values[:, :, self.used : end] = values
        self.used = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def _allocate(self, rows: int, keys: Tensor, values: Tensor) -> None:
        # zeros: a slot that nobody may see still takes part in sums, with weight 0, and 0 · nan is nan
        self.keys, self.values = (x.new_zeros(rows, x.shape[1], self.slots, x.shape[3]) for x in (keys, values))

    def room(self, rows: int, slots: int) -> KeyValues:
        """Room for keys and values of this kind; the slots this one uses are used there too, and hold nothing yet."""
        made = KeyValues(slots)
        made._allocate(rows, self.keys, self.values)
        made.used = self.used
        return made

    def take_in(self, other: KeyValues, source: Int[Tensor, " k"], target: Int[Tensor, " k"]) -> None:
        """Rows ``source`` of the other memory become rows ``target`` of this one, ending where these end."""
        start = self.used - other.used
        self.keys[target, :, start : self.used] = other.keys[source, :, : other.used]
        self.values[target, :, start : self.used] = other.values[source, :, : other.used]

    def keep(self, rows: Int[Tensor, " k"]) -> None:
        """Goes on with these rows alone."""
        kept = self.room(len(rows), self.slots)
        kept.keys[:, :, : self.used] = self.keys[rows, :, : self.used]
        kept.values[:, :, : self.used] = self.values[rows, :, : self.used]
        self.keys, self.values = kept.keys, kept.values

    def drop(self, count: int) -> None:
        """Forgets the first ``count`` slots."""
        left = self.used - count
        for x in (self.keys, self.values):
            x[:, :, :left] = x[:, :, count : self.used].clone()
        self.used = left


class Memory:
    """The same for every block of a model."""

    def __init__(self, layers: list[KeyValues]):
        self.layers = layers

    @classmethod
    def empty(cls, depth: int, slots: int) -> Memory:
        return cls([KeyValues(slots) for _ in range(depth)])

    @property
    def used(self) -> int:
        return self.layers[0].used

    @property
    def slots(self) -> int:
        return self.layers[0].slots

    def room(self, rows: int, slots: int) -> Memory:
        return Memory([layer.room(rows, slots) for layer in self.layers])

    def take_in(self, other: Memory, source: Tensor, target: Tensor) -> None:
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            mine.take_in(theirs, source, target)

    def keep(self, rows: Tensor) -> None:
        for layer in self.layers:
            layer.keep(rows)

    def drop(self, count: int) -> None:
        for layer in self.layers:
            layer.drop(count)
