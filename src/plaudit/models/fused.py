"""Inference through Llama-shaped blocks: fewer and larger matrix products over weights laid out for them.

Queries, keys and values are one product, gate and up projection another; where oneDNN is at hand the weights are
copied into its blocked layout. A model is taken only if its structure is the known one and its numbers, tried on a few
tokens, are the model's own; every other family runs through its transformers forward. Left out: gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from plaudit.models.memory import KeyValues

#: rows of the products that the blocked layout is made for
PACKED_FOR = 64
PACKABLE = (torch.float32, torch.bfloat16)


def round_up(rows: int) -> int:
    """The next of the sizes that matrices are padded to: four a doubling at most.

    oneDNN compiles code for every size it meets, which takes as long as a product and about a megabyte; a few wasted
    rows are cheaper.
    """
    step = max(1, 1 << max(0, (rows - 1).bit_length() - 3))
    return -(-rows // step) * step


def padded(x: Float[Tensor, "*n i"], dtype: torch.dtype) -> Float[Tensor, "m i"]:
    """The rows of x as one matrix in ``dtype``, with zero rows up to the next size."""
    flat = x.flatten(0, -2)
    size = round_up(len(flat))
    if size == len(flat):
        return flat.to(dtype)
    out = flat.new_zeros(size, flat.shape[1], dtype=dtype)
    out[: len(flat)] = flat
    return out


class Product:
    """x @ Wᵀ + b, where W stacks the weights of several layers that read the same input.

    With ``copy`` the weights are copied into oneDNN's layout, on a CPU that has it; a ``dtype`` that is not the layers'
    own needs a copy anywhere. A copy stays what it is until :meth:`refresh`. Otherwise the layers' own weights are read
    at every call.
    """

    def __init__(self, layers: Sequence[nn.Linear], dtype: torch.dtype, copy: bool):
        self.layers, self.dtype = layers, dtype
        own = layers[0].weight
        self.packed = copy and own.device.type == "cpu" and dtype in PACKABLE and can_pack()
        self.copy = self.packed or dtype != own.dtype
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Takes over the layers' present weights."""
        if not self.copy:
            return
        weight = torch.cat([layer.weight.detach().to(self.dtype) for layer in self.layers])
        self.bias = None
        if any(layer.bias is not None for layer in self.layers):
            biases = [
                torch.zeros_like(layer.weight[:, 0]) if layer.bias is None else layer.bias for layer in self.layers
            ]
            self.bias = torch.cat([b.detach().to(self.dtype) for b in biases])
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR) if self.packed else weight

    def __call__(self, x: Float[Tensor, "*n i"]) -> Float[Tensor, "*n o"]:
        if not self.copy:
            parts = [F.linear(x, layer.weight, layer.bias) for layer in self.layers]
            return parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        if self.packed:
            rows = padded(x, self.dtype)
            product = torch.ops.mkldnn._linear_pointwise(rows, self.weight, self.bias, "none", [], "")
            return product[: x.shape[:-1].numel()].unflatten(0, x.shape[:-1])
        return F.linear(x, self.weight, self.bias)


class Int8Product:
    """The same from 8-bit integers: weights with a scale for each output, activations with a scale for each row.

    Both are symmetric: x ≈ scale · q with q in −127 … 127. Products are summed in 32-bit integers.
    """

    def __init__(self, layers: Sequence[nn.Linear]):
        self.layers = layers
        self._taken: list[tuple[int, int]] = []
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Takes over the layers' present weights, if any of them changed."""
        present = [(layer.weight.data_ptr(), layer.weight._version) for layer in self.layers]
        # weights that are trained may be exchanged for others behind the same address
        if present == self._taken and not any(layer.weight.requires_grad for layer in self.layers):
            return
        self._taken = present
        weight = torch.cat([layer.weight.detach().float() for layer in self.layers])
        self.scale, self.weight = _quantised(weight)
        biases = [layer.bias for layer in self.layers]
        self.bias = None
        if any(b is not None for b in biases):
            zeros = (torch.zeros_like(layer.weight[:, 0]) for layer in self.layers)
            self.bias = torch.cat([z if b is None else b.detach() for b, z in zip(biases, zeros, strict=True)]).float()

    def __call__(self, x: Float[Tensor, "*n i"]) -> Float[Tensor, "*n o"]:
        scale, rows = _quantised(x.flatten(0, -2).float())
        product = torch._int_mm(rows, self.weight.t()).float().mul_(scale[:, None]).mul_(self.scale)
        if self.bias is not None:
            product += self.bias
        return product.unflatten(0, x.shape[:-1]).to(x.dtype)


def _quantised(x: Float[Tensor, "n i"]) -> tuple[Float[Tensor, " n"], Int[Tensor, "n i"]]:
    """Each row's scale and its 8-bit integers."""
    scale = x.abs().amax(-1).clamp(min=1e-12) / 127
    return scale, (x / scale[:, None]).round_().to(torch.int8)


@cache
def can_pack() -> bool:
    """Whether this build of PyTorch multiplies with weights in oneDNN's layout, and rightly."""
    try:
        for dtype in PACKABLE:
            generator = torch.Generator().manual_seed(0)
            x, weight = (torch.randn(n, 48, generator=generator).to(dtype) for n in (3, 32))
            packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR)
            product = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
            if not torch.allclose(product.float(), F.linear(x, weight).float(), atol=0.1, rtol=0.02):
                return False
    except (RuntimeError, AttributeError):
        return False
    return True


@dataclass(frozen=True)
class Rotation:
    """Cosines and sines of the positions, (b, n, 1, D/2)."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def of(cls, base: Any, hidden: Tensor, positions: Int[Tensor, "b n"]) -> Rotation:
        cos, sin = base.rotary_emb(hidden, positions)
        half = cos.shape[-1] // 2
        return cls(cos[:, :, None, :half], sin[:, :, None, :half])

    def to(self, dtype: torch.dtype) -> Rotation:
        return Rotation(self.cos.to(dtype), self.sin.to(dtype))

    def __call__(self, x: Float[Tensor, "b n h D"]) -> Float[Tensor, "b n h D"]:
        half = x.shape[-1] // 2
        a, b, out = x[..., :half], x[..., half:], torch.empty_like(x)
        torch.mul(a, self.cos, out=out[..., :half]).addcmul_(b, self.sin, value=-1)
        torch.mul(b, self.cos, out=out[..., half:]).addcmul_(a, self.sin)
        return out


class FusedBlock:
    """One block. The residual stream keeps the model's dtype; products and attention run in ``dtype``.

    With ``int8`` the products alone run in 8-bit integers.
    """

    def __init__(self, block: Any, dtype: torch.dtype, copy: bool, *, int8: bool = False):
        self.block, attention, mlp = block, block.self_attn, block.mlp
        self.dtype, self.scale, self.width = dtype, attention.scaling, attention.head_dim

        def product(*layers: nn.Linear) -> Product | Int8Product:
            return Int8Product(layers) if int8 else Product(layers, dtype, copy)

        self.qkv = product(attention.q_proj, attention.k_proj, attention.v_proj)
        self.out, self.down = product(attention.o_proj), product(mlp.down_proj)
        self.gate_up = product(mlp.gate_proj, mlp.up_proj)
        self.heads = attention.q_proj.out_features // self.width
        self.kv_heads = attention.k_proj.out_features // self.width
        self.per_head_norms = hasattr(attention, "q_norm")

    def refresh(self) -> None:
        """Takes over the block's present weights."""
        for product in (self.qkv, self.out, self.gate_up, self.down):
            product.refresh()

    def __call__(
        self,
        hidden: Float[Tensor, "b n H"],
        rotation: Rotation,
        memory: KeyValues | None = None,
        mask: Bool[Tensor, "b 1 m L"] | None = None,
    ) -> Float[Tensor, "b n H"]:
        """The block's output. Attention is causal over the n given positions, and over what the memory holds already.

        ``mask`` says which of all those each position may see; it can be left out where every one is real and either
        the memory was empty or n is 1.
        """
        rows, count, _ = hidden.shape
        read = _rms_norm(self.block.input_layernorm, hidden).to(self.dtype)
        qkv = self.qkv(read).view(rows, count, self.heads + 2 * self.kv_heads, self.width)
        if self.per_head_norms:
            q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], 2)
            q = rotation(self.block.self_attn.q_norm(q).to(self.dtype))
            k = rotation(self.block.self_attn.k_norm(k).to(self.dtype))
        else:
            rotated = rotation(qkv[:, :, : self.heads + self.kv_heads])
            q, k, v = rotated[:, :, : self.heads], rotated[:, :, self.heads :], qkv[:, :, self.heads + self.kv_heads :]
        attended = self._attend(q, k.transpose(1, 2), v.transpose(1, 2), memory, mask)
        hidden = hidden + self.out(attended)
        read = _rms_norm(self.block.post_attention_layernorm, hidden).to(self.dtype)
        gate, up = self.gate_up(read).chunk(2, -1)
        return hidden.add_(self.down(F.silu(gate).mul_(up)))

    def _attend(
        self, q: Tensor, keys: Tensor, values: Tensor, memory: KeyValues | None, mask: Tensor | None
    ) -> Float[Tensor, "b n d"]:
        rows, count = q.shape[:2]
        causal = mask is None and count > 1
        if memory is not None:
            keys, values = memory.append(keys, values)
        if count == 1:
            # The query heads that share a key head stand in the place of positions: no key is read twice.
            q = q.reshape(rows, self.kv_heads, self.heads // self.kv_heads, self.width)
            out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=self.scale)
            return out.reshape(rows, 1, -1)
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), keys, values, attn_mask=mask, is_causal=causal, scale=self.scale, enable_gqa=True
        )
        return out.transpose(1, 2).reshape(rows, count, -1)


def _rms_norm(norm: Any, x: Float[Tensor, "*n H"]) -> Float[Tensor, "*n H"]:
    x = x.float()
    inverse = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1])
    return (x * inverse.add_(norm.variance_epsilon).rsqrt_()).mul_(norm.weight)


_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_MLP = {"gate_proj", "up_proj", "down_proj"}


def _known_structure(base: Any) -> bool:
    if {name for name, _ in base.named_children()} != {"embed_tokens", "layers", "norm", "rotary_emb"}:
        return False
    if any(kind != "full_attention" for kind in getattr(base.config, "layer_types", None) or []):
        return False
    if getattr(base.config, "sliding_window", None) and getattr(base.config, "use_sliding_window", True):
        return False
    for block in base.layers:
        parts = dict(block.named_children())
        if set(parts) != {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}:
            return False
        attention, mlp = dict(parts["self_attn"].named_children()), dict(parts["mlp"].named_children())
        extra = set(attention) - _ATTENTION
        activation = mlp.pop("act_fn", None)
        if not set(attention) >= _ATTENTION or extra not in (set(), {"q_norm", "k_norm"}) or set(mlp) != _MLP:
            return False
        linears = [*(attention[name] for name in _ATTENTION), *mlp.values()]
        if any(type(linear) is not nn.Linear for linear in linears):
            return False
        if not isinstance(activation, nn.SiLU) and "silu" not in type(activation).__name__.lower():
            return False
        norms = (parts["input_layernorm"], parts["post_attention_layernorm"])
        if any(not hasattr(norm, "variance_epsilon") for norm in norms):
            return False
        if not all(hasattr(parts["self_attn"], name) for name in ("head_dim", "scaling")):
            return False
    return True


@torch.no_grad()
def can_fuse(base: Any) -> bool:
    """Whether this decoder's blocks are Llama-shaped: by structure, and by their outputs on a few tokens."""
    if not _known_structure(base):
        return False
    device = base.embed_tokens.weight.device
    count = torch.arange(6, device=device)[None]
    # At the last positions that the model knows: some families change their attention only there.
    positions = count + max(0, (getattr(base.config, "max_position_embeddings", None) or 6) - 6)
    tokens = count % base.config.vocab_size
    hidden = base.embed_tokens(tokens)
    rotation = Rotation.of(base, hidden, positions)
    if rotation.cos.shape[-1] * 2 != base.layers[0].self_attn.head_dim:
        return False
    for block in base.layers:
        hidden = FusedBlock(block, hidden.dtype, copy=False)(hidden, rotation)
    mine = base.norm(hidden).float()
    own = base(input_ids=tokens, position_ids=positions, use_cache=False).last_hidden_state.float()
    tolerance = 1e-4 if base.dtype == torch.float32 else 5e-2
    return bool((mine - own).norm() <= tolerance * own.norm())
