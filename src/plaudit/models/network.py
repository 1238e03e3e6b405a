"""A network is a stack with heads. Its outputs are read through four functions that know the alignment."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from plaudit import ops
from plaudit.models.fused import Product
from plaudit.models.stack import Stack
from plaudit.types import Sequences


class LanguageHead(nn.Module):
    """Hidden states to logits, with the scaling or soft cap that some families apply after the output layer.

    A ``fixed`` head multiplies with a copy of the layer's weights laid out for speed, as they were when it was made (or
    at the last :meth:`refresh`), and passes no gradient to them.
    """

    def __init__(self, model: PreTrainedModel, *, fixed: bool = False):
        super().__init__()
        self.linear = model.get_output_embeddings()
        self.product = Product([self.linear], self.linear.weight.dtype, copy=True) if fixed else None
        config = model.config
        self.scale = getattr(config, "logit_scale", None) or 1.0 / (getattr(config, "logits_scaling", None) or 1.0)
        self.soft_cap = getattr(config, "final_logit_softcapping", None)

    def forward(self, hidden: Float[Tensor, "*n H"]) -> Float[Tensor, "*n V"]:
        logits = self.project(hidden)
        if self.scale != 1.0:
            logits = logits * self.scale
        return self.soft_cap * torch.tanh(logits / self.soft_cap) if self.soft_cap else logits

    def project(self, hidden: Float[Tensor, "*n H"]) -> Float[Tensor, "*n V"]:
        """The output layer alone. A fixed head's copy has no gradient, so it serves where none is recorded."""
        if self.product is None or (torch.is_grad_enabled() and hidden.requires_grad):
            return self.linear(hidden)
        return self.product(hidden)

    def refresh(self) -> None:
        """A fixed head takes over the layer's present weights."""
        if self.product is not None:
            self.product.refresh()


def scalar_head(weight: Float[Tensor, "1 H"], shift: float = 0.0) -> nn.Linear:
    """One linear unit, score = weight · hidden − shift, with its own copy of the weight."""
    head = nn.Linear(weight.shape[1], 1)
    with torch.no_grad():
        head.weight.copy_(weight)
        head.bias.fill_(-shift)
    return head.to(weight.device)


@dataclass(frozen=True)
class Outputs:
    """What a network made of some rows: final hidden states (B, S, H); the heads are applied on demand."""

    hidden: Float[Tensor, "B S H"]
    network: Network


class Network(nn.Module):
    """A stack with a language head, a scalar head, or both. Dropout is never active: it stays in evaluation mode."""

    def __init__(self, stack: Stack, language: LanguageHead | None = None, scalar: nn.Linear | None = None):
        super().__init__()
        self.stack, self.language, self.scalar = stack, language, scalar
        self.eval()

    def forward(self, rows: Sequences) -> Outputs:
        return Outputs(self.stack(rows), self)


#: positions whose logits exist at the same time
CHUNK = 128


def token_policy(
    outputs: Outputs, rows: Sequences, temperature: float = 1.0, *, entropy_gradient: bool = False
) -> tuple[Float[Tensor, "B S"], Float[Tensor, "B S"]]:
    """log π(tok_s | tok_<s) and the entropy of π(· | tok_<s) at ``temperature``, 0 outside the mask.

    Logits exist only for the masked positions, a few at a time. The entropy carries a gradient only where it is
    asked for. A mask at index 0 has no state before it and stays 0.
    """
    head, hidden, tokens = _choices(outputs, rows)
    frozen = not head.linear.weight.requires_grad and not entropy_gradient and not head.soft_cap
    if frozen and torch.is_grad_enabled() and hidden.requires_grad:
        logprobs, entropy = _FrozenHead.apply(hidden, head, tokens, head.scale / temperature)
    else:
        parts = [
            ops.logprobs_and_entropy(head(h) / temperature, t)
            for h, t in zip(hidden.split(CHUNK), tokens.split(CHUNK), strict=True)
        ]
        logprobs, entropy = torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])
        entropy = entropy if entropy_gradient else entropy.detach()
    return _scatter(logprobs, rows), _scatter(entropy, rows)


def _choices(outputs: Outputs, rows: Sequences) -> tuple[LanguageHead, Float[Tensor, "N H"], Tensor]:
    """The language head, the states in which the masked tokens were chosen, and those tokens, i64 (N,)."""
    head = outputs.network.language
    assert head is not None, "this network has no language head"
    chosen = rows.mask[:, 1:]
    return head, outputs.hidden[:, :-1][chosen], rows.tokens[:, 1:][chosen]


class _FrozenHead(torch.autograd.Function):
    """Log-probabilities through an output layer that is not trained, without keeping a logit.

    ∂ log p(y) / ∂h = scale · (W_y − Σ_v p_v W_v) needs only the row's own distribution, so it is taken while the logits
    are there, and the backward pass merely multiplies it by the incoming gradient of the row.
    """

    @staticmethod
    def forward(ctx, hidden: Tensor, head: LanguageHead, tokens: Tensor, scale: float):
        logprobs, entropy, slope = [], [], []
        weight = head.linear.weight
        for h, t in zip(hidden.split(CHUNK), tokens.split(CHUNK), strict=True):
            logp = head.project(h)
            logp = torch.log_softmax(logp.mul_(scale).float(), -1)
            logprobs.append(logp.gather(-1, t[:, None]).squeeze(-1))
            p = logp.exp()
            # a token that cannot be drawn adds 0 · −inf = nan; its limit is 0
            entropy.append(-torch.linalg.vecdot(p, logp.clamp_(min=-1e4)))
            slope.append(scale * (weight[t] - p.to(weight.dtype) @ weight))
        ctx.save_for_backward(torch.cat(slope))
        out = torch.cat(logprobs), torch.cat(entropy)
        ctx.mark_non_differentiable(out[1])
        return out

    @staticmethod
    def backward(ctx, grad: Tensor, _entropy_grad: Tensor):
        (slope,) = ctx.saved_tensors
        return grad[:, None].to(slope.dtype) * slope, None, None, None


def _scatter(flat: Float[Tensor, " N"], rows: Sequences) -> Float[Tensor, "B S"]:
    out = torch.zeros(rows.mask.shape, dtype=flat.dtype, device=flat.device)
    out[:, 1:] = out[:, 1:].masked_scatter(rows.mask[:, 1:], flat)
    return out


def token_logprobs(outputs: Outputs, rows: Sequences, temperature: float = 1.0) -> Float[Tensor, "B S"]:
    """log π(tok_s | tok_<s) at ``temperature``, 0 outside the mask."""
    if torch.is_grad_enabled():
        return token_policy(outputs, rows, temperature)[0]
    head, hidden, tokens = _choices(outputs, rows)
    pairs = zip(hidden.split(CHUNK), tokens.split(CHUNK), strict=True)
    return _scatter(torch.cat([ops.logprobs_of(head(h) / temperature, t) for h, t in pairs]), rows)


def token_values(outputs: Outputs, rows: Sequences) -> Float[Tensor, "B S"]:
    """V(tok_<s), 0 outside the mask."""
    head = outputs.network.scalar
    assert head is not None, "this network has no scalar head"
    values = head(outputs.hidden[:, :-1]).squeeze(-1).float()
    out = torch.zeros(rows.mask.shape, device=values.device)
    out[:, 1:] = torch.where(rows.mask[:, 1:], values, 0.0)
    return out


def text_scores(outputs: Outputs, rows: Sequences) -> Float[Tensor, " B"]:
    """The score of each row's text, read at its last token (the end token of an answer is no part of its text)."""
    head = outputs.network.scalar
    assert head is not None, "this network has no scalar head"
    at = rows.text_end()
    hidden = outputs.hidden[torch.arange(len(rows), device=at.device), at]
    return head(hidden).squeeze(-1).float()
