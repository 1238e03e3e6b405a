"""A transformers decoder as stacks: whole, or cut into a frozen trunk and the blocks above it.

The cut works on any decoder-only family, because it only shortens the list of blocks of a shallow copy: both halves
keep the model's own forward, masks and positions, and share its parameters. What is left out: heads, and who shares
what (see arrangements).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from plaudit.errors import ModelError
from plaudit.types import Sequences

S = TypeVar("S", bound=Sequences)


def blocks_of(base: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """The attribute name and the list of a decoder's blocks.

    Raises:
        ModelError: the model has no such list (it is not a decoder-only transformer).
    """
    for name, child in base.named_children():
        if isinstance(child, nn.ModuleList) and len(child) == base.config.num_hidden_layers:
            return name, child
    raise ModelError(
        f"{type(base).__name__} has no list of {base.config.num_hidden_layers} blocks; use a decoder-only model"
    )


def _with_blocks(base: PreTrainedModel, start: int, stop: int) -> PreTrainedModel:
    """A shallow copy of ``base`` that owns only blocks start … stop−1; the parameters stay shared."""
    name, blocks = blocks_of(base)
    part = copy.copy(base)
    part._modules = dict(base._modules)
    setattr(part, name, nn.ModuleList(blocks[start:stop]))
    part.config = copy.deepcopy(base.config)
    part.config.num_hidden_layers = stop - start
    kinds = getattr(base.config, "layer_types", None)
    if kinds:
        part.config.layer_types = kinds[start:stop]
    return part


def own_blocks(base: PreTrainedModel, count: int) -> PreTrainedModel:
    """A shallow copy of ``base`` whose top ``count`` blocks are its own; everything else stays shared."""
    name, blocks = blocks_of(base)
    clone = copy.copy(base)
    clone._modules = dict(base._modules)
    keep = len(blocks) - count
    setattr(clone, name, nn.ModuleList([*blocks[:keep], *(copy.deepcopy(b) for b in blocks[keep:])]))
    return clone


class Stack(nn.Module):
    """From rows to final hidden states (B, S, H), the model's last normalisation included.

    Rows of like length are run together, so that little work goes into padding; what stands at padding is 0.
    """

    def forward(self, rows: Sequences) -> Tensor:
        parts = list(like_lengths(rows.lengths))
        if len(parts) == 1 and int(rows.lengths.max()) == rows.tokens.shape[1]:
            return self.run(rows)
        hidden: Tensor | None = None
        for index in parts:
            out = self.run(rows.take(index).trim())
            if hidden is None:
                hidden = out.new_zeros(*rows.tokens.shape, out.shape[-1])
            hidden = hidden.index_put((index[:, None], torch.arange(out.shape[1], device=out.device)[None]), out)
        assert hidden is not None
        return hidden

    def run(self, rows: Sequences) -> Tensor:
        """The same, for all rows at once."""
        raise NotImplementedError


def like_lengths(lengths: Tensor, *, smallest: int = 256, waste: float = 0.15) -> Iterator[Tensor]:
    """Row indices in parts of at least ``smallest`` tokens (but for the last), cut where padding would exceed ``waste``
    of a part."""
    order = torch.argsort(lengths, descending=True, stable=True)
    part: list[int] = []
    real = 0
    for row, size in zip(order.tolist(), lengths[order].tolist(), strict=True):
        padded = int(lengths[part[0]]) * (len(part) + 1) if part else size
        if part and real >= smallest and real + size < (1 - waste) * padded:
            yield torch.tensor(part, device=lengths.device)
            part, real = [], 0
        part.append(row)
        real += size
    yield torch.tensor(part, device=lengths.device)


class WholeStack(Stack):
    """Every block, from token ids. Right padding under causal attention needs no attention mask."""

    def __init__(self, base: PreTrainedModel):
        super().__init__()
        self.base = base

    def run(self, rows: Sequences) -> Tensor:
        return self.base(input_ids=rows.tokens, use_cache=False).last_hidden_state


class UpperStack(Stack):
    """The top ``count`` blocks, from a trunk's features."""

    def __init__(self, base: PreTrainedModel, count: int):
        super().__init__()
        total = len(blocks_of(base)[1])
        self.base = _with_blocks(base, total - count, total)

    def run(self, rows: Sequences) -> Tensor:
        features = rows.features
        if features.shape[-1] == 0:
            raise ValueError("these rows carry no trunk features; call the trunk's prepare first")

        def enter(_module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
            # What stands before the first block (embedding, its scaling, absolute positions) is the trunk's work.
            if args:
                return (features, *args[1:]), kwargs
            return args, kwargs | {"hidden_states": features}

        handle = blocks_of(self.base)[1][0].register_forward_pre_hook(enter, with_kwargs=True)
        try:
            return self.base(inputs_embeds=features, use_cache=False).last_hidden_state
        finally:
            handle.remove()


def has_bfloat16_units() -> bool:
    """Whether this processor multiplies bfloat16 matrices in hardware (Intel AMX), several times as fast as float32."""
    capabilities: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(capabilities.get("amx_bf16", False))


def _multiply_in_bfloat16(linear: nn.Linear) -> None:
    """Gives a frozen layer a bfloat16 copy of its weight to multiply with; the weight itself stays as it is."""
    linear.requires_grad_(False)
    weight, bias = linear.weight.to(torch.bfloat16), linear.bias

    def forward(hidden: Tensor) -> Tensor:
        product = nn.functional.linear(hidden.to(torch.bfloat16), weight).to(hidden.dtype)
        return product if bias is None else product + bias

    linear.forward = forward  # type: ignore[method-assign, assignment]


class Capture:
    """Records the output of one module during a ``with`` block, in the order of the calls."""

    def __init__(self, module: nn.Module):
        self.module = module
        self.outputs: list[Tensor] = []

    def __enter__(self) -> Capture:
        def record(_module: nn.Module, _args: tuple, output: Tensor | tuple) -> None:
            self.outputs.append(output[0] if isinstance(output, tuple) else output)

        self._handle = self.module.register_forward_hook(record)
        return self

    def __exit__(self, *_: object) -> None:
        self._handle.remove()


class Trunk:
    """The frozen lower blocks that all roles share."""

    def __init__(self, base: PreTrainedModel, upper: int, precision: str = "float32"):
        """The blocks of ``base`` below its top ``upper`` ones.

        With ``precision`` "bfloat16" (or "auto" on a machine with bfloat16 matrix units) their matrix products take
        bfloat16 inputs and sum in float32; everything between them stays float32. All roles read the same features, so
        the ratio of new to old policy is untouched by it.

        Raises:
            ModelError: there are not that many blocks.
        """
        total = len(blocks_of(base)[1])
        if not 0 < upper < total:
            raise ModelError(f"the model has {total} blocks; train between 1 and {total - 1} of them, not {upper}")
        self.base = _with_blocks(base, 0, total - upper)
        #: the block whose output the roles read; an engine may record it while it generates
        self.last: nn.Module = blocks_of(self.base)[1][-1]
        self.width: int = base.config.hidden_size
        if precision == "bfloat16" or (precision == "auto" and has_bfloat16_units()):
            for module in blocks_of(self.base)[1].modules():
                if isinstance(module, nn.Linear):
                    _multiply_in_bfloat16(module)

    @torch.no_grad()
    def prepare(self, rows: S, token_budget: int = 512) -> S:
        """The rows with their features filled; rows that have them already come back as they are."""
        if rows.features.shape[-1]:
            return rows
        features = torch.zeros(*rows.tokens.shape, self.width, device=rows.tokens.device)
        for index in Sequences.micro_batches(rows, token_budget):
            part = rows.take(index).trim()
            with Capture(self.last) as capture:
                self.base(input_ids=part.tokens, use_cache=False)
            features[index, : part.tokens.shape[1]] = capture.outputs[0].float()
        return replace(rows, features=features)
