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

from plaudit.errors import ConfigError
from plaudit.models.fused import FusedBlock, Rotation, can_fuse
from plaudit.models.memory import KeyValues, Memory
from plaudit.models.stack import Capture, Trunk, blocks_of


class Decoder(Protocol):
    """A model that reads rows a few tokens at a time, into a memory of its own kind."""

    def memory(self, slots: int) -> Memory:
        """An empty memory for ``slots`` tokens a row."""
        ...

    def read(
        self,
        memory: Memory,
        tokens: Int[Tensor, "b n"],
        positions: Int[Tensor, "b n"],
        real: Bool[Tensor, "b L"] | None,
    ) -> tuple[Float[Tensor, "b H"], Float[Tensor, "b n F"]]:
        """Final hidden state of each row's newest token, and the trunk's features of the tokens read (F = 0: none).

        ``real`` marks the slots that hold no padding, those of these tokens included; None where none does.
        """
        ...

    def refresh(self) -> None:
        """Takes over the model's present weights."""
        ...


def decoder_for(model: PreTrainedModel, trunk: Trunk | None, weights: str = "float32") -> Decoder:
    """The fastest decoder that computes this model, its blocks above the trunk from such ``weights``.

    Raises:
        ConfigError: this family runs through its transformers forward, whose weights stay as they are.
    """
    base = model.base_model
    if trunk.fused is not None if trunk is not None else can_fuse(base):
        return FusedDecoder(base, trunk, weights)
    if weights != "float32":
        raise ConfigError(
            f"engine.weights={weights}: {type(model).__name__} is not Llama-shaped, and runs through its own forward; "
            "use engine.weights=float32"
        )
    return TransformersDecoder(base, trunk)


class FusedDecoder:
    """Decodes through fused blocks: the trunk's, where there is one, and copies of the blocks above it."""

    def __init__(self, base: PreTrainedModel, trunk: Trunk | None, weights: str = "float32"):
        self.base, self.depth = base, trunk.depth if trunk else 0
        self.lower = (trunk.fused or []) if trunk else []
        dtype, int8 = torch.bfloat16 if weights == "bfloat16" else base.dtype, weights == "int8"
        upper = blocks_of(base)[1][self.depth :]
        self.upper = [FusedBlock(block, dtype, copy=True, int8=int8) for block in upper]

    def refresh(self) -> None:
        for block in self.upper:
            block.refresh()

    def memory(self, slots: int) -> Memory:
        return Memory.empty(len(self.lower) + len(self.upper), slots)

    def read(self, memory: Memory, tokens: Tensor, positions: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor]:
        hidden = self.base.get_input_embeddings()(tokens)
        rotation = Rotation.of(self.base, hidden, positions)
        rotations = {block.dtype: rotation.to(block.dtype) for block in (*self.lower[:1], *self.upper[:1])}
        mask = _visible(real, tokens.shape[1]) if real is not None else None
        features = hidden.new_zeros(*tokens.shape, 0)
        blocks = [*self.lower, *self.upper]
        for i, (block, layer) in enumerate(zip(blocks, memory.layers, strict=True), 1):
            hidden = block(hidden, rotations[block.dtype], layer, mask)
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

    def memory(self, slots: int) -> Memory:
        return Memory.empty(self.base.config.num_hidden_layers, slots)

    def read(self, memory: Memory, tokens: Tensor, positions: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor]:
        cache = Cache(layers=[_Layer(layer) for layer in memory.layers])
        given = {"input_ids": tokens, "position_ids": positions, "past_key_values": cache, "use_cache": True}
        given["attention_mask"] = None if real is None else real.long()
        if self.trunk is None:
            hidden = self.base(**given).last_hidden_state
            return hidden[:, -1], hidden.new_zeros(*tokens.shape, 0)
        with self.trunk.products(), Capture(self.trunk.last) as capture:
            hidden = self.base(**given).last_hidden_state
        return hidden[:, -1], capture.outputs[0]


class _Layer(CacheLayerMixin):
    """One block's keys and values as transformers asks for them."""

    is_sliding = False

    def __init__(self, kept: KeyValues):
        super().__init__()
        self.kept = kept
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """The memory takes its room itself."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        return self.kept.append(key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return self.kept.used

    def get_max_length(self) -> int:
        return self.kept.slots

    get_max_cache_shape = get_max_length
