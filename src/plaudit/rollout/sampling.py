"""How a token is drawn from logits."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper

from plaudit.config import SamplingConfig
from plaudit.errors import NonFinite


def likeliest(logits: Tensor, sampling: SamplingConfig) -> Tensor:
    """Logits without the tokens that top-k and top-p leave out, by transformers' own rules."""
    nothing = torch.zeros(len(logits), 0, dtype=torch.long)
    if sampling.top_k:
        logits = TopKLogitsWarper(sampling.top_k)(nothing, logits)
    if sampling.top_p < 1:
        logits = TopPLogitsWarper(sampling.top_p)(nothing, logits)
    return logits


#: tokens whose probabilities are summed together on the way to a drawn token
BLOCK = 256


def sample(logits: Tensor, uniform: Tensor, *, greedy: bool = False) -> tuple[Tensor, Tensor]:
    """Tokens i64 (b,) drawn from softmax(logits) by inverting its distribution function at ``uniform`` (b,), or the
    likeliest ones, and their log-probabilities f32 (b,).
    """
    if greedy:
        tokens = logits.argmax(-1)
        return tokens, torch.log_softmax(logits.float(), -1).gather(-1, tokens[:, None]).squeeze(-1)
    p = torch.softmax(logits.float(), -1)
    # In two steps, first among blocks of tokens and then within one: a running sum over a whole vocabulary is slow, and
    # in float32 it loses the small probabilities.
    whole = p.shape[-1] // BLOCK * BLOCK
    blocks = p[:, :whole].unflatten(-1, (-1, BLOCK)).sum(-1)
    if whole < p.shape[-1]:
        blocks = torch.cat([blocks, p[:, whole:].sum(-1, keepdim=True)], -1)
    total = blocks.sum(-1, keepdim=True)
    if not torch.isfinite(total).all():
        row = int((~torch.isfinite(total)).flatten().nonzero()[0])
        raise NonFinite(f"the model's logits are not finite (answer {row} of this batch); nothing was sampled")
    block, rest = _invert(blocks, uniform[:, None] * total)
    ids = block * BLOCK + torch.arange(BLOCK, device=p.device)
    inside = torch.where(ids < p.shape[-1], p.gather(-1, ids.clamp(max=p.shape[-1] - 1)), 0.0)
    place, _ = _invert(inside, rest)
    tokens = ids.gather(-1, place)
    return tokens.squeeze(-1), p.gather(-1, tokens).squeeze(-1).log()


def _invert(weights: Tensor, point: Tensor) -> tuple[Tensor, Tensor]:
    """The first place (b, 1) whose running sum exceeds ``point`` (b, 1), and what of the point lies inside it.

    That place's weight is never 0: a point that rounding put at the end or beyond is drawn back into the last one that
    has any.
    """
    sums = weights.cumsum(-1)
    end = sums[:, -1:]
    point = torch.minimum(point, torch.nextafter(end, torch.zeros_like(end)))
    place = torch.searchsorted(sums, point, right=True)
    before = torch.where(place > 0, sums.gather(-1, (place - 1).clamp(min=0)), 0.0)
    return place, point - before
