"""The records that flow between the stages.

One alignment and one mask serve everywhere. Sequences are right-padded to (B, S). Every per-token tensor at index s
speaks of *the choice of token s*: ``logprobs[b, s]`` is log pi(tok_s | tok_<s), ``values[b, s]`` is V(tok_<s) and
``rewards[b, s]`` is paid on emitting tok_s. ``mask[b, s]`` is true where the policy chose token s (or where s is a
supervised target). ``lengths[b]`` is where padding begins; padding is never recognised by comparing ids.

A new stage makes a new type; no field is ``None`` until later. This module leaves out everything that computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

#: Fields whose second axis is the token axis; they are cut and padded together.
TOKEN_AXIS = frozenset({"tokens", "mask", "features", "logprobs", "values", "advantages", "returns"})


@dataclass(frozen=True)
class Prompt:
    """What the policy is asked: the text, its token ids, and whatever columns came with the row."""

    text: str
    ids: tuple[int, ...]
    columns: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Rows:
    """Mixin for frozen dataclasses whose tensors share their first axis, one entry a row."""

    def _tensors(self) -> dict[str, Tensor]:
        return {f.name: v for f in fields(self) if isinstance(v := getattr(self, f.name), Tensor)}

    def __len__(self) -> int:
        return next(iter(self._tensors().values())).shape[0]

    def take(self, index: Tensor | Sequence[int]) -> Self:
        """The rows at ``index`` (i64 (N,)), in that order."""
        index = torch.as_tensor(index, dtype=torch.long)
        changes: dict[str, Any] = {name: value[index] for name, value in self._tensors().items()}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, tuple):
                changes[f.name] = tuple(value[i] for i in index.tolist())
        return replace(self, **changes)

    def to(self, device: torch.device | str) -> Self:
        return replace(self, **{name: value.to(device) for name, value in self._tensors().items()})


@dataclass(frozen=True)
class Sequences(Rows):
    """Token rows as every network reads them.

    ``features`` (B, S, F) is what a frozen trunk shared by all roles makes of the tokens; F = 0 where every role runs
    whole. An arrangement fills it once a rollout, and no algorithm looks at it.
    """

    tokens: Int[Tensor, "B S"]
    mask: Bool[Tensor, "B S"]
    lengths: Int[Tensor, " B"]
    features: Float[Tensor, "B S F"]

    @classmethod
    def pack(cls, rows: Sequence[Sequence[int]], masks: Sequence[Sequence[bool]], **extra: Any) -> Self:
        """Right-pads lists of ids; the id under the padding is 0 and means nothing."""
        lengths = torch.tensor([len(row) for row in rows], dtype=torch.long)
        width = int(lengths.max()) if len(rows) else 0
        tokens = torch.zeros(len(rows), width, dtype=torch.long)
        mask = torch.zeros(len(rows), width, dtype=torch.bool)
        for i, (row, chosen) in enumerate(zip(rows, masks, strict=True)):
            tokens[i, : len(row)] = torch.tensor(row, dtype=torch.long)
            mask[i, : len(row)] = torch.tensor(chosen, dtype=torch.bool)
        return cls(tokens=tokens, mask=mask, lengths=lengths, features=torch.zeros(len(rows), width, 0), **extra)

    def text_end(self) -> Int[Tensor, " B"]:
        """Index of each row's last token of text, where a reward model reads its score."""
        return self.lengths - 1

    def trim(self) -> Self:
        """The same rows without the columns that are padding in every one of them."""
        width = int(self.lengths.max()) if len(self) else 0
        return replace(self, **{n: v[:, :width] for n, v in self._tensors().items() if n in TOKEN_AXIS})

    def widen(self, width: int) -> Self:
        """The same rows padded to ``width`` columns."""
        changes: dict[str, Any] = {}
        for name, value in self._tensors().items():
            if name in TOKEN_AXIS:
                missing = width - value.shape[1]
                changes[name] = pad(value, (0, 0, 0, missing) if value.dim() == 3 else (0, missing))
        return replace(self, **changes)

    @classmethod
    def cat(cls, parts: Sequence[Self]) -> Self:
        """One record of all rows, in order; the parts may differ in width."""
        width = max(part.tokens.shape[1] for part in parts)
        parts = [part.widen(width) for part in parts]
        changes: dict[str, Any] = {n: torch.cat([getattr(p, n) for p in parts]) for n in parts[0]._tensors()}
        for f in fields(parts[0]):
            if isinstance(getattr(parts[0], f.name), tuple):
                changes[f.name] = sum((getattr(p, f.name) for p in parts), ())
        return replace(parts[0], **changes)

    def micro_batches(self, token_budget: int) -> Iterator[Int[Tensor, " N"]]:
        """Row indices cut so that rows x longest row stays within ``token_budget``, longest rows first.

        A single row longer than the budget is a micro-batch of its own.
        """
        order = torch.argsort(self.lengths, descending=True, stable=True)
        sizes = self.lengths[order].tolist()
        start = 0
        while start < len(order):
            # As few micro-batches as the budget allows for the rows left, of even size: no small rest at the end.
            most = max(1, token_budget // max(1, sizes[start]))
            left = len(order) - start
            count = -(-left // -(-left // most))
            yield order[start : start + count]
            start += count


def mean_weights(mask: Bool[Tensor, "B S"]) -> Float[Tensor, "B S"]:
    """The matrix that turns a sum into the mean over the true positions of ``mask``: sums to 1, or to 0 if none is."""
    return mask.float() / mask.sum().clamp(min=1)


@dataclass(frozen=True)
class Demonstrations(Sequences):
    """SFT rows: ``mask`` marks the supervised targets."""

    def weights(self) -> Float[Tensor, "B S"]:
        return mean_weights(self.mask)


@dataclass(frozen=True)
class Rollout(Sequences):
    """Prompts with the policy's answers. ``mask`` marks the tokens the policy chose, the end token included.

    ``logprobs`` f32 (B, S): as the sampler saw them, at the sampling temperature. ``terminated`` bool (B,): the policy
    ended the answer itself; otherwise the length limit cut it. ``version`` i64 (B,): the policy that sampled.
    """

    logprobs: Float[Tensor, "B S"]
    terminated: Bool[Tensor, " B"]
    version: Int[Tensor, " B"]
    prompts: tuple[Prompt, ...]

    def text_end(self) -> Int[Tensor, " B"]:
        # A score is a function of the text, and the end token is no part of the text: the same answer scores the same
        # here, in reward-model training, on the command line and in the exported model.
        return self.lengths - 1 - self.terminated.long()

    def response_ids(self, row: int) -> list[int]:
        """Token ids of one answer, without its end token."""
        start, end = len(self.prompts[row].ids), int(self.text_end()[row]) + 1
        return self.tokens[row, start:end].tolist()

    def response_lengths(self) -> Int[Tensor, " B"]:
        """Chosen tokens a row, the end token included."""
        return self.mask.sum(1)


@dataclass(frozen=True)
class Experience(Sequences):
    """A rollout with everything an update needs; every field is fixed before the first epoch.

    ``logprobs``: log pi_old at the sampling temperature, from the trainer's own network in evaluation mode.
    """

    logprobs: Float[Tensor, "B S"]
    values: Float[Tensor, "B S"]
    advantages: Float[Tensor, "B S"]
    returns: Float[Tensor, "B S"]

    @classmethod
    def of(cls, rollout: Rollout, **computed: Tensor) -> Experience:
        base = {name: getattr(rollout, name) for name in ("tokens", "mask", "lengths", "features")}
        return cls(**base, **computed)

    def weights(self) -> Float[Tensor, "B S"]:
        return mean_weights(self.mask)


@dataclass(frozen=True)
class Answer:
    """One candidate answer: its text, and whether its author ended it (else a length limit cut it)."""

    text: str
    ended: bool = True


@dataclass(frozen=True)
class Comparison:
    """A question put to an annotator: one prompt (empty where texts stand alone) and two or more answers.

    ``provenance`` says where the answers came from (model, sampling settings, seed, or the data set).
    """

    id: int
    prompt: str
    answers: tuple[Answer, ...]
    provenance: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Preference:
    """What one annotator said of one comparison.

    ``ranks[i]`` is the place of answer i, 0 the best; equal places are a tie. A choice between two is (0, 1) or (1, 0),
    "best of k" is one 0 among 1s, a full ranking 0 … k−1. ``order`` is the order in which the answers were shown.
    """

    comparison: Comparison
    ranks: tuple[int, ...]
    annotator: str
    order: tuple[int, ...] = ()
    seconds: float = 0.0
    created: str = ""


@dataclass(frozen=True)
class RankedAnswers(Sequences):
    """Reward-model rows: the answers of several comparisons, each comparison's rows adjacent.

    ``group`` i64 (B,): which comparison a row belongs to. ``rank`` i64 (B,): its place there, 0 the best.
    """

    group: Int[Tensor, " B"]
    rank: Int[Tensor, " B"]

    def preferred(self) -> Bool[Tensor, "B B"]:
        """[i, j] is true where rows i and j answer the same question and i is placed before j."""
        return (self.group[:, None] == self.group[None, :]) & (self.rank[:, None] < self.rank[None, :])

    def weights(self) -> Float[Tensor, " B"]:
        """What one pair of a row's comparison counts: comparisons share the batch by their answers, pairs evenly."""
        nothing = torch.zeros(len(self), device=self.group.device)
        pairs = nothing.index_add(0, self._dense_group(), self.preferred().sum(1).float())
        sizes = nothing.index_add(0, self._dense_group(), torch.ones_like(nothing))
        share = torch.where(pairs > 0, sizes, 0.0)
        weight = share / share.sum().clamp(min=1) / pairs.clamp(min=1)
        return weight[self._dense_group()]

    def _dense_group(self) -> Int[Tensor, " B"]:
        dense: Tensor = torch.unique(self.group, return_inverse=True)[1]
        return dense

    def micro_batches(self, token_budget: int) -> Iterator[Int[Tensor, " N"]]:
        """Whole comparisons at a time: a pair's loss needs both its rows."""
        taken: list[int] = []
        width = 0
        for group in torch.unique_consecutive(self.group).tolist():
            rows = (self.group == group).nonzero().flatten().tolist()
            wider = max(width, int(self.lengths[rows].max()))
            if taken and (len(taken) + len(rows)) * wider > token_budget:
                yield torch.tensor(taken)
                taken, wider = [], int(self.lengths[rows].max())
            taken, width = taken + rows, wider
        if taken:
            yield torch.tensor(taken)
