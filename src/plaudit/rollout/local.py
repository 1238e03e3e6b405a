"""The local engine: a sampler over any transformers decoder, with a preallocated key-value cache.

Prompts are padded on the left so that all rows write the same cache slot, and repacked to right padding at the end.
Rows that have ended leave the batch. A row's random numbers are drawn for the row, so its answer does not depend on
when its neighbours end. Left out: top-p and top-k, stop strings, sharing of one prompt's prefill.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from plaudit.config import SamplingConfig
from plaudit.models.network import LanguageHead
from plaudit.models.stack import Capture
from plaudit.types import Prompt, Rollout


class _Layer(CacheLayerMixin):
    """Keys and values (B, heads, slots, D) of one block, allocated once and written in place."""

    is_sliding = False

    def __init__(self, slots: int):
        super().__init__()
        self.slots, self.used = slots, 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        rows, heads, _, width = key_states.shape
        self.keys = key_states.new_empty(rows, heads, self.slots, width)
        self.values = value_states.new_empty(rows, heads, self.slots, value_states.shape[-1])
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.used + key_states.shape[2]
        self.keys[:, :, self.used : end] = key_states
        self.values[:, :, self.used : end] = value_states
        self.used = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.used + query_length, 0

    def get_seq_length(self) -> int:
        return self.used

    def get_max_length(self) -> int:
        return self.slots

    get_max_cache_shape = get_max_length

    def keep(self, rows: Tensor) -> None:
        if self.is_initialized:
            self.keys, self.values = self.keys[rows], self.values[rows]


class _Batch:
    """The rows still being answered, and what each of them has so far."""

    def __init__(self, prompts: Sequence[Prompt], slots: int, layers: int, device: torch.device | str):
        width = max(len(p.ids) for p in prompts)
        self.rows = torch.arange(len(prompts), device=device)
        self.inputs = torch.zeros(len(prompts), width, dtype=torch.long)
        self.attention = torch.zeros(len(prompts), width + slots, dtype=torch.long)
        for i, prompt in enumerate(prompts):
            self.inputs[i, width - len(prompt.ids) :] = torch.tensor(prompt.ids)
            self.attention[i, width - len(prompt.ids) :] = 1
        self.inputs, self.attention = self.inputs.to(device), self.attention.to(device)
        self.width, self.step = width, 0
        self.positions = (self.attention[:, :width].cumsum(1) - 1).clamp(min=0)
        self.cache = Cache(layers=[_Layer(width + slots) for _ in range(layers)])
        self.padded = bool((self.attention[:, :width] == 0).any())

    def forward(self, base: PreTrainedModel) -> Tensor:
        """Final hidden state (b, H) of the newest token of every row."""
        mask = self.attention[:, : self.width + self.step] if self.padded else None
        out = base(
            input_ids=self.inputs,
            attention_mask=mask,
            position_ids=self.positions,
            past_key_values=self.cache,
            use_cache=True,
        )
        return out.last_hidden_state[:, -1]

    def extend(self, tokens: Tensor) -> None:
        self.inputs, self.positions, self.step = tokens[:, None], self.positions[:, -1:] + 1, self.step + 1

    def keep(self, alive: Tensor) -> None:
        self.rows, self.inputs, self.attention = self.rows[alive], self.inputs[alive], self.attention[alive]
        self.positions = self.positions[alive]
        for layer in self.cache.layers:
            layer.keep(alive)


def sample(logits: Tensor, uniform: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Tokens i64 (b,) drawn from softmax(logits / temperature) by inverting its distribution function at ``uniform``
    (b,), and their log-probabilities f32 (b,). At temperature 0 the likeliest token, log-probability at temperature 1.
    """
    logp = torch.log_softmax(logits.float() / (temperature or 1.0), -1)
    if temperature == 0:
        tokens = logp.argmax(-1)
    else:
        cumulative = logp.exp().cumsum(-1)
        point = uniform[:, None] * cumulative[:, -1:]
        tokens = torch.searchsorted(cumulative, point, right=True).clamp(max=logits.shape[-1] - 1).squeeze(-1)
    return tokens, logp.gather(-1, tokens[:, None]).squeeze(-1)


class LocalEngine:
    """Answers with the actor's own modules, so that taking over its weights costs nothing.

    ``record`` is the module whose output becomes the rollout's features: the last block of a frozen trunk, whose work
    is thereby done once for generation and for every role.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        end_ids: Sequence[int],
        *,
        record: nn.Module | None = None,
        max_rows: int = 128,
        device: torch.device | str = "cpu",
    ):
        self.base, self.head = model.base_model, LanguageHead(model)
        self.end_ids = torch.tensor(sorted(end_ids), device=device)
        self.record, self.max_rows, self.device = record, max_rows, device
        self.version = 0

    def load(self, version: int) -> None:
        self.version = version

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
        layers = self.base.config.num_hidden_layers
        batch = _Batch(prompts, limit, layers, self.device)
        tokens = torch.zeros(count, limit, dtype=torch.long, device=self.device)
        logprobs = torch.zeros(count, limit, device=self.device)
        lengths = torch.full((count,), limit, device=self.device)
        terminated = torch.zeros(count, dtype=torch.bool, device=self.device)
        recorder = _Recorder(self.record, count, batch.width + limit)
        with recorder:
            while True:
                hidden = batch.forward(self.base)
                recorder.collect(batch.rows)
                if batch.step == limit:
                    break
                step = batch.step
                chosen, logp = sample(self.head(hidden), uniform[batch.rows, step], sampling.temperature)
                tokens[batch.rows, step], logprobs[batch.rows, step] = chosen, logp
                ended = torch.isin(chosen, self.end_ids)
                terminated[batch.rows] = ended
                lengths[batch.rows[ended]] = step + 1
                batch.extend(chosen)
                if self.record is None and (batch.step == limit or bool(ended.all())):
                    break
                # An end token's own features are needed by nobody: no choice follows it, and no score is read there.
                alive = (~ended).nonzero().flatten()
                if len(alive) == 0:
                    break
                if len(alive) < len(ended):
                    batch.keep(alive)
        return self._rollout(prompts, tokens, logprobs, lengths, terminated, recorder.features, batch.width)

    def _rollout(
        self,
        prompts: Sequence[Prompt],
        tokens: Tensor,
        logprobs: Tensor,
        lengths: Tensor,
        terminated: Tensor,
        features: Tensor,
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
        packed = torch.zeros(*rollout.tokens.shape, features.shape[-1])
        for i, (prompt, n) in enumerate(zip(prompts, counts, strict=True)):
            start = width - len(prompt.ids)
            rollout.logprobs[i, len(prompt.ids) : len(prompt.ids) + n] = logprobs[i, :n].cpu()
            packed[i, : len(rows[i])] = features[i, start : start + len(rows[i])].cpu()
        return replace(rollout, features=packed)


class _Recorder:
    """Collects a module's outputs into (B, slots, F), row by row; F = 0 where there is nothing to record."""

    def __init__(self, module: nn.Module | None, rows: int, slots: int):
        self.capture = Capture(module) if module is not None else None
        self.rows, self.slots, self.at = rows, slots, 0
        self.features = torch.zeros(rows, slots, 0)

    def __enter__(self) -> None:
        if self.capture:
            self.capture.__enter__()

    def __exit__(self, *args: object) -> None:
        if self.capture:
            self.capture.__exit__(*args)

    def collect(self, rows: Tensor) -> None:
        if not self.capture:
            return
        output = self.capture.outputs.pop()
        if self.features.shape[-1] == 0:
            self.features = torch.zeros(self.rows, self.slots, output.shape[-1], device=output.device)
        self.features[rows, self.at : self.at + output.shape[1]] = output.float()
        self.at += output.shape[1]
