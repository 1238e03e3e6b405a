"""What an engine needs of a model: the next hidden states, given the keys and values of what came before.

Two decoders keep that promise: the fused one for Llama-shaped models, and one over the transformers forward for every
other family.
"""

from __future__ import annotations

from typing import Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from plaudit.models.fused import FusedBlock, KeyValues, Rotation, can_fuse
from plaudit.models.stack import Capture, Trunk, blocks_of


class Decoder(Protocol):
    """A model that reads rows a few tokens at a time.

    All rows write the same cache slot; padding stands on the left.
    """

    def start(self, rows: int, slots: int) -> None:
        """Forgets what was read, and makes room for ``slots`` tokens of ``rows`` rows."""
        ...

    def read(
        self, tokens: Int[Tensor, "b n"], positions: Int[Tensor, "b n"], real: Bool[Tensor, "b L"] | None
    ) -> tuple[Float[Tensor, "b H"], Float[Tensor, "b n F"]]:
        """Final hidden state of each row's newest token, and the trunk's features of the tokens read (F = 0: none).

        ``real`` marks the slots that hold no padding; None where none does.
        """
        ...

    def keep(self, rows: Int[Tensor, " k"]) -> None:
        """Goes on with these rows alone."""
        ...

    def finish(self) -> None:
        """Gives back what the rows took."""
        ...

    def refresh(self) -> None:
        """Takes over the model's present weights."""
        ...


def decoder_for(model: PreTrainedModel, trunk: Trunk | None) -> Decoder:
    """The fastest decoder that computes this model."""
    base = model.base_model
    if trunk is not None:
        return FusedDecoder(base, trunk) if trunk.fused is not None else TransformersDecoder(base, trunk)
    return FusedDecoder(base, None) if can_fuse(base) else TransformersDecoder(base, None)


class FusedDecoder:
    """Decodes through fused blocks: the trunk's, where there is one, and copies of the blocks above it."""

    def __init__(self, base: PreTrainedModel, trunk: Trunk | None):
        self.base, self.depth = base, trunk.depth if trunk else 0
        self.lower = (trunk.fused or []) if trunk else []
        self.memories: list[KeyValues] = []
        self.upper = [FusedBlock(block, base.dtype, copy=True) for block in blocks_of(base)[1][self.depth :]]

    def refresh(self) -> None:
        for block in self.upper:
            block.refresh()

    def start(self, rows: int, slots: int) -> None:
        device = self.base.get_input_embeddings().weight.device
        self.memories = [b.memory(rows, slots, device) for b in (*self.lower, *self.upper)]

    def finish(self) -> None:
        self.memories = []

    def keep(self, rows: Tensor) -> None:
        for memory in self.memories:
            memory.keep(rows)

    def read(self, tokens: Tensor, positions: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor]:
        hidden = self.base.get_input_embeddings()(tokens)
        rotation = Rotation.of(self.base, hidden, positions)
        low = rotation.to(self.lower[0].dtype) if self.lower else rotation
        mask = _visible(real, tokens.shape[1]) if real is not None else None
        features = hidden.new_zeros(*tokens.shape, 0)
        blocks = [*self.lower, *self.upper]
        for i, (block, memory) in enumerate(zip(blocks, self.memories, strict=True), 1):
            hidden = block(hidden, low if i <= self.depth else rotation, memory, mask)
            if i == self.depth:
                features = hidden
        return self.base.norm(hidden[:, -1]), features


def _visible(real: Bool[Tensor, "b L"], count: int) -> Bool[Tensor, "b 1 n L"]:
    """Which slots each of the newest ``count`` tokens sees: those up to its own that are real, and always its own, so
    that padding stays finite."""
    slots = torch.arange(real.shape[1], device=real.device)
    own = slots[-count:, None]
    return (real[:, None, :] & (slots <= own) | (slots == own))[:, None]


class TransformersDecoder:
    """Decodes through the model's own forward, with a preallocated cache."""

    def __init__(self, base: PreTrainedModel, trunk: Trunk | None):
        self.base, self.trunk = base, trunk

    def refresh(self) -> None:
        """Nothing to do: these are the model's own modules."""

    def start(self, rows: int, slots: int) -> None:
        self.cache = Cache(layers=[_Layer(slots) for _ in range(self.base.config.num_hidden_layers)])

    def finish(self) -> None:
        self.cache = Cache(layers=[])

    def keep(self, rows: Tensor) -> None:
        for layer in self.cache.layers:
            layer.keep(rows)

    def read(self, tokens: Tensor, positions: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor]:
        given = {"input_ids": tokens, "position_ids": positions, "past_key_values": self.cache, "use_cache": True}
        given["attention_mask"] = None if real is None else real.long()
        if self.trunk is None:
            hidden = self.base(**given).last_hidden_state
            return hidden[:, -1], hidden.new_zeros(*tokens.shape, 0)
        with self.trunk.products(), Capture(self.trunk.last) as capture:
            hidden = self.base(**given).last_hidden_state
        return hidden[:, -1], capture.outputs[0]


class _Layer(CacheLayerMixin):
    """Keys and values (B, heads, slots, D) of one block, allocated once and written in place."""

    is_sliding = False

    def __init__(self, slots: int):
        super().__init__()
        self.slots = slots
        self.memory: KeyValues | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.memory = KeyValues.like(key_states, value_states, self.slots)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        if self.memory is None:
            self.lazy_initialization(key_states, value_states)
        assert self.memory is not None
        return self.memory.append(key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return self.memory.used if self.memory else 0

    def get_max_length(self) -> int:
        return self.slots

    get_max_cache_shape = get_max_length

    def keep(self, rows: Tensor) -> None:
        if self.memory:
            self.memory.keep(rows)
