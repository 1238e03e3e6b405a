"""A transformers decoder as stacks: whole, or cut into a frozen trunk and the blocks above it.

The cut works on any decoder-only family, because it only shortens the list of blocks of a shallow copy: both halves
keep the model's own forward, masks and positions, and share its parameters. What is left out: heads, and who shares
what (see arrangements).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from plaudit.errors import ModelError
from plaudit.models.fused import FusedBlock, Rotation, can_fuse, padded
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

    #: whether the backward pass computes a block's activations again, instead of the forward pass keeping them
    recompute = False

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


def like_lengths(lengths: Tensor, *, smallest: int = 512, waste: float = 0.15) -> Iterator[Tensor]:
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

    def __init__(self, base: PreTrainedModel, precision: str = "float32", *, exact: bool = False):
        """``exact``: only gradients are made in ``precision``; the forward pass keeps the model's own."""
        super().__init__()
        self.base, self.low, self.exact = base, in_bfloat16(precision, base), exact

    def run(self, rows: Sequences) -> Tensor:
        with running(self.base, self.low, exact=self.exact, recompute=self.recompute):
            return self.base(input_ids=rows.tokens, use_cache=False).last_hidden_state


class UpperStack(Stack):
    """The top ``count`` blocks, from a trunk's features."""

    def __init__(self, base: PreTrainedModel, count: int, precision: str = "float32", *, exact: bool = False):
        """``exact``: only gradients are made in ``precision``; the forward pass keeps the model's own."""
        super().__init__()
        total = len(blocks_of(base)[1])
        self.base, self.low = _with_blocks(base, total - count, total), in_bfloat16(precision, base)
        self.exact = exact

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
            with running(self.base, self.low, exact=self.exact, recompute=self.recompute):
                return self.base(inputs_embeds=features, use_cache=False).last_hidden_state
        finally:
            handle.remove()


def has_bfloat16_units() -> bool:
    """Whether this processor multiplies bfloat16 matrices in hardware (Intel AMX), several times as fast as float32."""
    capabilities: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(capabilities.get("amx_bf16", False))


class _Bfloat16Product(torch.autograd.Function):
    """x @ Wᵀ and its gradients from bfloat16 inputs, or the gradients alone where the product is to be ``exact``.

    Sums run in float32; each result is rounded to bfloat16.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, exact: bool) -> Tensor:
        low_x, low_weight = padded(x, torch.bfloat16), weight.to(torch.bfloat16)
        ctx.save_for_backward(low_x, low_weight)
        ctx.shape = x.shape[:-1]
        if exact:
            return nn.functional.linear(x, weight)
        product = nn.functional.linear(low_x, low_weight)
        return product[: ctx.shape.numel()].to(x.dtype).unflatten(0, ctx.shape)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        low = padded(grad, torch.bfloat16)
        to_x = to_weight = None
        if ctx.needs_input_grad[0]:
            to_x = (low @ weight)[: ctx.shape.numel()].to(grad.dtype).unflatten(0, ctx.shape)
        if ctx.needs_input_grad[1]:
            to_weight = (low.T @ x).to(grad.dtype)
        return to_x, to_weight, None


@contextmanager
def bfloat16_products(blocks: nn.Module, *, exact: bool = False) -> Iterator[None]:
    """Inside, every linear layer of ``blocks`` multiplies bfloat16 copies of its input and weight.

    So does its backward pass; with ``exact`` it alone. Weights, gradients and all that lies between the products keep
    their dtype.
    """
    linears = [module for module in blocks.modules() if isinstance(module, nn.Linear)]
    for linear in linears:
        linear.forward = _bfloat16_forward(linear, exact)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        for linear in linears:
            del linear.forward


def _bfloat16_forward(linear: nn.Linear, exact: bool) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        if exact and not torch.is_grad_enabled():
            return nn.functional.linear(x, linear.weight, linear.bias)
        product = _Bfloat16Product.apply(x, linear.weight, exact)
        return product if linear.bias is None else product + linear.bias

    return forward


def products(base: PreTrainedModel, low: bool, *, exact: bool = False) -> AbstractContextManager[None]:
    """What a forward pass through a decoder's own blocks runs in: bfloat16 products, or nothing special."""
    return bfloat16_products(blocks_of(base)[1], exact=exact) if low else nullcontext()


@contextmanager
def running(base: PreTrainedModel, low: bool, *, exact: bool, recompute: bool) -> Iterator[None]:
    """The same for blocks that are trained; with ``recompute`` a block's activations live only while its gradient is
    made."""
    blocks = list(blocks_of(base)[1]) if recompute else []
    for block in blocks:
        block.forward = _recomputing(block, low, exact)
    try:
        with products(base, low, exact=exact):
            yield
    finally:
        for block in blocks:
            del block.forward


def _recomputing(block: nn.Module, low: bool, exact: bool) -> Callable[..., Any]:
    plain = block.forward

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        # the second pass comes when the first one's surroundings are gone
        return nullcontext(), bfloat16_products(block, exact=exact) if low else nullcontext()

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return plain(*args, **kwargs)
        return checkpoint(plain, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts, **kwargs)

    return forward


def in_bfloat16(precision: str, base: PreTrainedModel) -> bool:
    """Whether matrix products of this model, asked for in ``precision``, run in bfloat16 where it is now."""
    on_cpu = base.device.type == "cpu"
    return precision == "bfloat16" or (precision == "auto" and on_cpu and has_bfloat16_units())


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

    def __init__(self, base: PreTrainedModel, upper: int, precision: str = "float32", *, sampling: bool = False):
        """The blocks of ``base`` below its top ``upper`` ones.

        With ``precision`` "bfloat16" (or "auto" on a machine with bfloat16 matrix units) their matrix products and
        attention take bfloat16 inputs and round their results; the residual stream stays float32. All roles read the
        same features, so the ratio of new to old policy is untouched by it. With ``sampling`` an engine generates
        through these blocks too, and their weights are copied into a layout made for that.

        Raises:
            ModelError: there are not that many blocks.
        """
        total = len(blocks_of(base)[1])
        if not 0 < upper < total:
            raise ModelError(f"the model has {total} blocks; train between 1 and {total - 1} of them, not {upper}")
        self.base = _with_blocks(base, 0, total - upper)
        blocks = blocks_of(self.base)[1]
        #: the block whose output the roles read
        self.last: nn.Module = blocks[-1]
        self.depth, self.width = len(blocks), int(base.config.hidden_size)
        blocks.requires_grad_(False)
        dtype = torch.bfloat16 if in_bfloat16(precision, base) else base.dtype
        #: the same blocks for inference, where the family allows it
        # weights that are copied for another dtype anyway may as well be copied into the faster layout
        copied = sampling or dtype != base.dtype
        self.fused = [FusedBlock(block, dtype, copy=copied) for block in blocks] if can_fuse(base) else None
        self.low = dtype != base.dtype

    def products(self) -> AbstractContextManager[None]:
        """What a forward pass through the model's own blocks runs in, to multiply as the trunk should."""
        return products(self.base, self.low)

    @torch.no_grad()
    def prepare(self, rows: S, token_budget: int = 512) -> S:
        """The rows with their features filled; rows that have them already come back as they are."""
        if rows.features.shape[-1]:
            return rows
        features = torch.zeros(*rows.tokens.shape, self.width, device=rows.tokens.device)
        for index in Sequences.micro_batches(rows, token_budget):
            tokens = rows.take(index).trim().tokens
            made = self._features(tokens.to(next(self.base.parameters()).device))
            features[index, : tokens.shape[1]] = made.float().to(features.device)
        return replace(rows, features=features)

    def _features(self, tokens: Tensor) -> Tensor:
        if self.fused is None:
            with self.products(), Capture(self.last) as capture:
                self.base(input_ids=tokens, use_cache=False)
            return capture.outputs[0]
        hidden = self.base.get_input_embeddings()(tokens)
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        rotation = Rotation.of(self.base, hidden, positions).to(self.fused[0].dtype)
        for block in self.fused:
            hidden = block(hidden, rotation)
        return hidden
