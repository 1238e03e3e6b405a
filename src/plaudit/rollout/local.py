"""The local engine: a sampler over any transformers decoder.

Prompts are padded on the left so that all rows write the same cache slot, and repacked to right padding at the end.
Rows that have ended leave the batch, a few at a time. A row's random numbers are drawn for the row, so its answer does
not depend on when its neighbours end. Left out: stop strings, sharing of one prompt's prefill.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper

from plaudit.config import SamplingConfig
from plaudit.errors import NonFinite
from plaudit.models.fused import round_up
from plaudit.models.network import LanguageHead
from plaudit.models.stack import Trunk
from plaudit.rollout.decoders import Decoder, decoder_for
from plaudit.types import Prompt, Rollout


class _Batch:
    """The rows still being answered, and what each of them has so far."""

    def __init__(self, prompts: Sequence[Prompt], slots: int, decoder: Decoder, device: torch.device | str):
        width = max(len(p.ids) for p in prompts)
        self.rows = torch.arange(len(prompts), device=device)
        #: places in the batch whose answers have not ended
        self.live = self.rows
        self.inputs = torch.zeros(len(prompts), width, dtype=torch.long)
        self.real = torch.ones(len(prompts), width + slots, dtype=torch.bool)
        for i, prompt in enumerate(prompts):
            self.inputs[i, width - len(prompt.ids) :] = torch.tensor(prompt.ids)
            self.real[i, : width - len(prompt.ids)] = False
        self.padded = not bool(self.real.all())
        self.inputs, self.real = self.inputs.to(device), self.real.to(device)
        self.width, self.step = width, 0
        self.positions = (self.real[:, :width].cumsum(1) - 1).clamp(min=0)
        self.decoder = decoder
        decoder.start(len(prompts), width + slots)

    def read(self) -> tuple[Tensor, Tensor]:
        """Final hidden state (b, H) of the newest token of every row, and the features of the tokens just read."""
        real = self.real[:, : self.width + self.step] if self.padded else None
        return self.decoder.read(self.inputs, self.positions, real)

    def extend(self, tokens: Tensor) -> None:
        self.inputs, self.positions, self.step = tokens[:, None], self.positions[:, -1:] + 1, self.step + 1

    def end(self, ended: Tensor) -> None:
        """Drops the live rows that have ended, bool (live,). They may stay in the batch for a while, unheeded."""
        self.live = self.live[~ended]
        size = round_up(len(self.live))
        if size >= len(self.rows):
            return
        ghosts = torch.ones(len(self.rows), dtype=torch.bool, device=self.rows.device)
        ghosts[self.live] = False
        kept = torch.cat([self.live, ghosts.nonzero().flatten()[: size - len(self.live)]])
        self.rows, self.inputs, self.real = self.rows[kept], self.inputs[kept], self.real[kept]
        self.positions = self.positions[kept]
        self.decoder.keep(kept)
        self.live = torch.arange(len(self.live), device=self.rows.device)


def _likeliest(logits: Tensor, sampling: SamplingConfig) -> Tensor:
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


class LocalEngine:
    """Answers with the actor's weights; :meth:`load` is due after every change of them, since some are copied.

    A ``trunk`` that the roles share is shared by the engine too: what its blocks make of each token becomes the
    rollout's features, so that their work is done once for generation and for every role. So is a ``head`` that is not
    trained.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        end_ids: Sequence[int],
        *,
        trunk: Trunk | None = None,
        head: LanguageHead | None = None,
        max_rows: int = 128,
        device: torch.device | str = "cpu",
    ):
        self.decoder = decoder_for(model, trunk)
        self.shared_head, self.head = head is not None, head or LanguageHead(model, fixed=True)
        self.end_ids = torch.tensor(sorted(end_ids), device=device)
        #: width of the features that are recorded; 0 for none
        self.records = trunk.width if trunk else 0
        self.max_rows, self.device = max_rows, device
        self.version = 0

    def load(self, version: int) -> None:
        self.version = version
        self.decoder.refresh()
        if not self.shared_head:
            self.head.refresh()

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingConfig,
        *,
        seed: int,
        progress: Callable[[int], None] | None = None,
    ) -> Rollout:
        """One answer a prompt, in order. ``progress`` is told after each batch how many answers are done."""
        uniform = torch.rand(
            len(prompts), sampling.max_new_tokens, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
        ).float()
        # Rows of similar prompts share a batch: less padding. The order is restored below.
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i].ids))
        parts = []
        for start in range(0, len(order), self.max_rows):
            index = order[start : start + self.max_rows]
            parts.append(self._batch([prompts[i] for i in index], sampling, uniform[index].to(self.device)))
            if progress:
                progress(start + len(index))
        return Rollout.cat(parts).take(torch.argsort(torch.tensor(order)))

    def _batch(self, prompts: Sequence[Prompt], sampling: SamplingConfig, uniform: Tensor) -> Rollout:
        count, limit = len(prompts), sampling.max_new_tokens
        batch = _Batch(prompts, limit, self.decoder, self.device)
        tokens = torch.zeros(count, limit, dtype=torch.long, device=self.device)
        logprobs = torch.zeros(count, limit, device=self.device)
        lengths = torch.full((count,), limit, device=self.device)
        terminated = torch.zeros(count, dtype=torch.bool, device=self.device)
        recorded = torch.zeros(count, batch.width + limit, self.records, device=self.device)
        at = 0
        while True:
            hidden, features = batch.read()
            if self.records:
                # rows that have ended are written too, and cut away below
                recorded[batch.rows, at : at + features.shape[1]] = features.float()
                at += features.shape[1]
            if batch.step == limit:
                break
            step = batch.step
            temperature = sampling.temperature or 1.0
            logits = _likeliest(self.head(hidden, temperature), sampling)
            chosen, logp = sample(logits, uniform[batch.rows, step], greedy=sampling.temperature == 0)
            rows, chosen_now = batch.rows[batch.live], chosen[batch.live]
            tokens[rows, step], logprobs[rows, step] = chosen_now, logp[batch.live]
            ended = torch.isin(chosen_now, self.end_ids) & (not sampling.fixed_length)
            terminated[rows] = ended
            lengths[rows[ended]] = step + 1
            batch.extend(chosen)
            if not self.records and batch.step == limit:
                break
            # An end token's own features are needed by nobody: no choice follows it, and no score is read there.
            if bool(ended.all()):
                break
            batch.end(ended)
        self.decoder.finish()
        return self._rollout(prompts, tokens, logprobs, lengths, terminated, recorded, batch.width)

    def _rollout(
        self,
        prompts: Sequence[Prompt],
        tokens: Tensor,
        logprobs: Tensor,
        lengths: Tensor,
        terminated: Tensor,
        recorded: Tensor,
        width: int,
    ) -> Rollout:
        """Repacks left-padded prompts and their answers to right-padded rows."""
        counts = lengths.tolist()
        answers = tokens.tolist()
        rows = [[*p.ids, *a[:n]] for p, a, n in zip(prompts, answers, counts, strict=True)]
        masks = [[False] * len(p.ids) + [True] * n for p, n in zip(prompts, counts, strict=True)]
        rollout = Rollout.pack(
            rows,
            masks,
            logprobs=torch.zeros(len(rows), max(map(len, rows))),
            terminated=terminated.cpu(),
            version=torch.full((len(rows),), self.version),
            prompts=tuple(prompts),
        )
        packed = torch.zeros(*rollout.tokens.shape, recorded.shape[-1])
        for i, (prompt, n) in enumerate(zip(prompts, counts, strict=True)):
            start = width - len(prompt.ids)
            rollout.logprobs[i, len(prompt.ids) : len(prompt.ids) + n] = logprobs[i, :n].cpu()
            packed[i, : len(rows[i])] = recorded[i, start : start + len(rows[i])].cpu()
        return replace(rollout, features=packed)
