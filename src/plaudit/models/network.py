"""A network is a stack with heads. Its outputs are read through four functions that know the alignment."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from plaudit import ops
from plaudit.models.fused import Int8Product, Product
from plaudit.models.stack import Stack
from plaudit.types import Rollout, Sequences


class LanguageHead(nn.Module):
    """Hidden states to logits, with the scaling or soft cap that some families apply after the output layer.

    A ``fixed`` head multiplies with a copy of the layer's weights laid out for speed, as they were when it was made (or
    at the last :meth:`refresh`), and passes no gradient to them; with ``low_gradients`` what it passes to the hidden
    states comes from bfloat16 products, and with ``int8`` the logits come from 8-bit integers.
    """

    def __init__(self, model: PreTrainedModel, *, fixed: bool = False, low_gradients: bool = False, int8: bool = False):
        super().__init__()
        self.linear = model.get_output_embeddings()
        self.product: Product | Int8Product | None = None
        if fixed:
            own = self.linear.weight.dtype
            self.product = Int8Product([self.linear]) if int8 else Product([self.linear], own, copy=True)
        low = low_gradients
        #: what the gradient to the hidden states is made of
        self.slopes = self.linear.weight.detach().to(torch.bfloat16) if low else self.linear.weight
        config = model.config
        self.scale = getattr(config, "logit_scale", None) or 1.0 / (getattr(config, "logits_scaling", None) or 1.0)
        self.soft_cap = getattr(config, "final_logit_softcapping", None)
        #: whether a factor on the logits may as well stand on the hidden states
        self.folds = not self.soft_cap and self.linear.bias is None

    def forward(self, hidden: Float[Tensor, "*n H"], temperature: float = 1.0) -> Float[Tensor, "*n V"]:
        """Logits, divided by ``temperature``."""
        if not self.folds:
            logits = self.project(hidden) * self.scale
            return (self.soft_cap * torch.tanh(logits / self.soft_cap) if self.soft_cap else logits) / temperature
        # a factor costs next to nothing on the hidden states, and a pass through memory on the logits
        return self.project(hidden * (self.scale / temperature) if self.scale != temperature else hidden)

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
    # without its random start, which would draw from the global stream
    head = nn.utils.skip_init(nn.Linear, weight.shape[1], 1)
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
    outputs: Outputs,
    rows: Sequences,
    temperature: float = 1.0,
    *,
    entropy_gradient: bool = False,
    where: Bool[Tensor, "B S"] | None = None,
) -> tuple[Float[Tensor, "B S"], Float[Tensor, "B S"]]:
    """log π(tok_s | tok_<s) and the entropy of π(· | tok_<s) at ``temperature``, 0 outside ``where`` (the rows' mask).

    Logits exist only for the positions asked for, a few at a time. The entropy carries a gradient only where that is
    asked for. Index 0 has no state before it and stays 0.
    """
    where = rows.mask if where is None else where
    head, hidden, tokens = _choices(outputs, rows, where)
    frozen = not head.linear.weight.requires_grad and not entropy_gradient and head.folds
    if frozen and torch.is_grad_enabled() and hidden.requires_grad:
        logprobs, entropy = _FrozenHead.apply(hidden, head, tokens, temperature)
    else:
        parts = [
            ops.logprobs_and_entropy(head(h, temperature), t)
            for h, t in zip(hidden.split(CHUNK), tokens.split(CHUNK), strict=True)
        ]
        logprobs, entropy = torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])
        entropy = entropy if entropy_gradient else entropy.detach()
    return _scatter(logprobs, where), _scatter(entropy, where)


def _choices(
    outputs: Outputs, rows: Sequences, where: Bool[Tensor, "B S"]
) -> tuple[LanguageHead, Float[Tensor, "N H"], Tensor]:
    """The language head, the states in which the tokens at ``where`` stand, and those tokens, i64 (N,)."""
    head = outputs.network.language
    assert head is not None, "this network has no language head"
    return head, outputs.hidden[:, :-1][where[:, 1:]], rows.tokens[:, 1:][where[:, 1:]]


class _FrozenHead(torch.autograd.Function):
    """Log-probabilities through an output layer that is not trained, without keeping a logit.

    ∂ log p(y) / ∂h = scale · (W_y − Σ_v p_v W_v) needs only the row's own distribution, so it is taken while the logits
    are there, and the backward pass merely multiplies it by the incoming gradient of the row.
    """

    @staticmethod
    def forward(ctx, hidden: Tensor, head: LanguageHead, tokens: Tensor, temperature: float):
        scale = head.scale / temperature
        logprobs, entropy, slope = [], [], []
        weight, slopes = head.linear.weight, head.slopes
        for h, t in zip(hidden.split(CHUNK), tokens.split(CHUNK), strict=True):
            logits = head(h, temperature).float()
            p = torch.softmax(logits, -1)
            # log Σ exp, from the likeliest token, whose probability is far from 0
            total = logits.amax(-1) - p.amax(-1).log()
            logprobs.append(logits.gather(-1, t[:, None]).squeeze(-1) - total)
            mean = torch.linalg.vecdot(p, logits)
            if not torch.isfinite(mean).all():
                # a token that cannot be drawn added 0 · −inf = nan; its limit is 0
                mean = torch.linalg.vecdot(p, logits.clamp(min=-1e4))
            entropy.append(total - mean)
            slope.append(scale * (weight[t] - (p.to(slopes.dtype) @ slopes).to(weight.dtype)))
        ctx.save_for_backward(torch.cat(slope))
        out = torch.cat(logprobs), torch.cat(entropy)
        ctx.mark_non_differentiable(out[1])
        return out

    @staticmethod
    def backward(ctx, grad: Tensor, _entropy_grad: Tensor):
        (slope,) = ctx.saved_tensors
        return grad[:, None].to(slope.dtype) * slope, None, None, None


def _scatter(flat: Float[Tensor, " N"], where: Bool[Tensor, "B S"]) -> Float[Tensor, "B S"]:
    out = torch.zeros(where.shape, dtype=flat.dtype, device=flat.device)
    out[:, 1:] = out[:, 1:].masked_scatter(where[:, 1:], flat)
    return out


def token_logprobs(
    outputs: Outputs, rows: Sequences, temperature: float = 1.0, *, where: Bool[Tensor, "B S"] | None = None
) -> Float[Tensor, "B S"]:
    """log π(tok_s | tok_<s) at ``temperature``, 0 outside ``where`` (the rows' mask)."""
    if torch.is_grad_enabled():
        return token_policy(outputs, rows, temperature, where=where)[0]
    where = rows.mask if where is None else where
    head, hidden, tokens = _choices(outputs, rows, where)
    pairs = zip(hidden.split(CHUNK), tokens.split(CHUNK), strict=True)
    return _scatter(torch.cat([ops.logprobs_of(head(h, temperature), t) for h, t in pairs]), where)


def token_alternatives(
    outputs: Outputs, rows: Sequences, count: int, temperature: float
) -> Float[Tensor, "B S 2 K"]:
    """log-probabilities and ids of the ``count`` likeliest tokens in the place of each masked one; 0 elsewhere.

    Ids are floats here, exact up to 2^24.
    """
    head, hidden, _ = _choices(outputs, rows, rows.mask)
    count = min(count, head.linear.weight.shape[0])
    out = torch.zeros(*rows.mask.shape, 2, count, device=hidden.device)
    parts = [torch.log_softmax(head(h, temperature).float(), -1).topk(count) for h in hidden.split(CHUNK)]
    found = torch.cat([torch.stack([p.values, p.indices.float()], 1) for p in parts])
    out[:, 1:][rows.mask[:, 1:]] = found
    return out


def hidden_states(outputs: Outputs, _rows: Sequences) -> Float[Tensor, "B S H"]:
    """The final hidden states, for what needs a distribution again later."""
    return outputs.hidden


def token_kl(
    outputs: Outputs, rows: Sequences, ref_hidden: Float[Tensor, "B S H"], reference: LanguageHead, temperature: float
) -> Float[Tensor, "B S"]:
    """KL(π ‖ π_ref) at ``temperature`` of each masked token's choice, the exact sum over the vocabulary.

    ``ref_hidden`` are the reference's final hidden states of the same rows. The result carries a gradient.
    """
    head, hidden, _ = _choices(outputs, rows, rows.mask)
    theirs = ref_hidden[:, :-1][rows.mask[:, 1:]]
    pairs = zip(hidden.split(CHUNK), theirs.split(CHUNK), strict=True)
    kl = [ops.full_kl(head(mine) / temperature, reference(ref) / temperature) for mine, ref in pairs]
    return _scatter(torch.cat(kl), rows.mask)


def token_values(
    outputs: Outputs, rows: Sequences, *, where: Bool[Tensor, "B S"] | None = None
) -> Float[Tensor, "B S"]:
    """V(tok_<s), 0 outside ``where`` (the rows' mask)."""
    where = rows.mask if where is None else where
    values = token_scores(outputs)[:, :-1]
    out = torch.zeros(where.shape, device=values.device)
    out[:, 1:] = torch.where(where[:, 1:], values, 0.0)
    return out


def last_values(outputs: Outputs, rows: Sequences) -> Float[Tensor, " B"]:
    """V of the state after each row's last token: how a truncated row may be continued."""
    return at(token_scores(outputs), rows.lengths - 1)


def prefix_scores(outputs: Outputs, rows: Sequences) -> Float[Tensor, "B S"]:
    """The score of each row's text up to and with token s, at the tokens of text that the policy chose; 0 elsewhere."""
    assert isinstance(rows, Rollout)
    return torch.where(rows.text_mask(), token_scores(outputs), 0.0)


def token_scores(outputs: Outputs) -> Float[Tensor, "B S"]:
    head = outputs.network.scalar
    assert head is not None, "this network has no scalar head"
    scores: Tensor = head(outputs.hidden).squeeze(-1).float()
    return scores


def at(x: Tensor, index: Int[Tensor, " B"]) -> Tensor:
    """Each row's value at its own index."""
    return x[torch.arange(len(x), device=x.device), index]


def text_scores(outputs: Outputs, rows: Sequences) -> Float[Tensor, " B"]:
    """The score of each row's text, read at its last token (the end token of an answer is no part of its text)."""
    head = outputs.network.scalar
    assert head is not None, "this network has no scalar head"
    return head(at(outputs.hidden, rows.text_end())).squeeze(-1).float()
