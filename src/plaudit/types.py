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

from plaudit import ops

#: Fields whose second axis is the token axis; they are cut and padded together.
TOKEN_AXIS = frozenset({"tokens", "mask", "features", "logprobs", "values", "advantages", "returns"}) | {
    *("value_mask", "ref_hidden", "ref_logprobs", "importance")
}


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

    @classmethod
    def from_padded(cls, ids: Int[Tensor, "B S"], attention_mask: Int[Tensor, "B S"]) -> Sequences:
        """Rows that come padded on either side, as (ids, attention_mask), repacked to the right; all tokens chosen.

        Raises:
            ValueError: a row's real tokens are not adjacent.
        """
        rows = []
        for i, (row, real) in enumerate(zip(ids, attention_mask.bool(), strict=True)):
            at = real.nonzero().flatten()
            if len(at) and int(at[-1] - at[0]) + 1 != len(at):
                raise ValueError(f"row {i}: its attention mask has a gap; padding stands before or behind a row")
            rows.append(row[real].tolist())
        return Sequences.pack(rows, [[True] * len(row) for row in rows])

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


@dataclass(frozen=True)
class Weights(Rows):
    """What each place of a batch counts in a mean, f32 (B, S) or (B,): a sum of values times these is the mean, however
    the rows are divided. ``main`` is for the loss, ``of_values`` for a value loss, ``places`` for what is measured."""

    main: Float[Tensor, " B *S"]
    of_values: Float[Tensor, " B *S"]
    places: Float[Tensor, " B *S"]

    @classmethod
    def alike(cls, weights: Float[Tensor, " B *S"]) -> Self:
        return cls(weights, weights, weights)

    def cut(self, width: int) -> Self:
        """Without the columns from ``width`` on, where there are columns."""
        return replace(self, **{n: v[:, :width] for n, v in self._tensors().items() if v.dim() == 2})


@dataclass(frozen=True)
class Demonstrations(Sequences):
    """SFT rows: ``mask`` marks the supervised targets."""

    def weights(self) -> Weights:
        return Weights.alike(ops.mean_weights(self.mask))


@dataclass(frozen=True)
class Rollout(Sequences):
    """Prompts with the policy's answers. ``mask`` marks the tokens the policy chose, the end token included.

    ``logprobs`` f32 (B, S): as the sampler saw them, at the sampling temperature. ``terminated`` bool (B,): the policy
    ended the answer itself; otherwise the length limit cut it. ``stopped`` bool (B,): it did so with a stop string,
    which is part of the text, as an end token is not. ``version`` i64 (B,): the policy that sampled.
    """

    logprobs: Float[Tensor, "B S"]
    terminated: Bool[Tensor, " B"]
    stopped: Bool[Tensor, " B"]
    version: Int[Tensor, " B"]
    prompts: tuple[Prompt, ...]

    @classmethod
    def pack(cls, rows: Sequence[Sequence[int]], masks: Sequence[Sequence[bool]], **extra: Any) -> Self:
        """As for :class:`Sequences`; no row was stopped unless said otherwise."""
        return super().pack(rows, masks, **{"stopped": torch.zeros(len(rows), dtype=torch.bool)} | extra)

    def text_end(self) -> Int[Tensor, " B"]:
        # A score is a function of the text, and the end token is no part of the text: the same answer scores the same
        # here, in reward-model training, on the command line and in the exported model.
        at = torch.arange(self.mask.shape[1], device=self.mask.device)
        return torch.where(self.mask, at, -1).amax(1) - (self.terminated & ~self.stopped).long()

    def text_mask(self) -> Bool[Tensor, "B S"]:
        """The chosen tokens that are text: all but the end token."""
        return self.mask & ~(ops.last_true(self.mask) & (self.terminated & ~self.stopped)[:, None])

    def fed(self, more: Int[Tensor, " B"], token: int) -> Self:
        """The same rows with ``token`` fed ``more`` times after each, which the policy did not choose.

        Features are left out: they are to be computed anew, with those of an end token, which sampling never read.
        """
        lengths = self.lengths + more
        wide = self.widen(int(lengths.max()))
        at = torch.arange(wide.tokens.shape[1], device=wide.tokens.device)
        added = (at >= self.lengths[:, None]) & (at < lengths[:, None])
        tokens = torch.where(added, token, wide.tokens)
        return replace(wide, tokens=tokens, lengths=lengths, features=wide.features[:, :, :0])

    def real(self) -> Bool[Tensor, "B S"]:
        """The positions that a row has: all but its padding."""
        return torch.arange(self.tokens.shape[1], device=self.lengths.device) < self.lengths[:, None]

    def response_ids(self, row: int) -> list[int]:
        """Token ids of one answer, without its end token."""
        start, end = len(self.prompts[row].ids), int(self.text_end()[row]) + 1
        return self.tokens[row, start:end].tolist()

    def response_lengths(self) -> Int[Tensor, " B"]:
        """Chosen tokens a row, the end token included."""
        return self.mask.sum(1)


@dataclass(frozen=True)
class Compared(Sequences):
    """Rows with the final hidden states (B, S, R) that the reference has for them."""

    ref_hidden: Float[Tensor, "B S R"]


@dataclass(frozen=True)
class Experience(Sequences):
    """A rollout with everything an update needs; every field is fixed before the first epoch.

    ``logprobs``: log pi_old, from the trainer's own network in evaluation mode, under the version that sampled.
    ``value_mask``: where the value loss is taken. ``importance``: what a token's policy loss weighs for the gap between
    engine and trainer, 1 where it is not corrected. ``ref_hidden`` (B, S, R): the reference's final hidden states,
    where an exact KL in the loss needs its distribution; R = 0 otherwise. ``version`` i64 (B,): the policy that
    sampled. ``number`` i64 (B,): counts a run's answers, by which one is known again after shuffling.
    """

    value_mask: Bool[Tensor, "B S"]
    logprobs: Float[Tensor, "B S"]
    ref_logprobs: Float[Tensor, "B S"]
    importance: Float[Tensor, "B S"]
    values: Float[Tensor, "B S"]
    advantages: Float[Tensor, "B S"]
    returns: Float[Tensor, "B S"]
    ref_hidden: Float[Tensor, "B S R"]
    version: Int[Tensor, " B"]
    number: Int[Tensor, " B"]
    reduction: ops.Reduction = "token-mean"

    @classmethod
    def of(cls, rollout: Rollout, **computed: Any) -> Experience:
        """A rollout with what was computed for it; what is not given is as if it were not asked for."""
        base = {name: getattr(rollout, name) for name in ("tokens", "mask", "lengths", "features", "version")}
        plain = {
            "value_mask": rollout.mask,
            "ref_logprobs": torch.zeros_like(rollout.logprobs),
            "importance": torch.ones_like(rollout.logprobs),
            "ref_hidden": rollout.features[:, :, :0],
            "number": torch.arange(len(rollout)),
        }
        return cls(**base, **plain | computed)

    def weights(self) -> Weights:
        main, of_values = ops.mean_weights(self.mask, self.reduction), ops.mean_weights(self.value_mask)
        return Weights(main, of_values, ops.mean_weights(self.mask))


def ranked(values: Sequence[float]) -> tuple[int, ...]:
    """The place of each value, the lowest first: how many are below it. Equal values share a place."""
    return tuple(sum(other < mine for other in values) for mine in values)


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

    @property
    def messages(self) -> list[dict[str, str]]:
        """The prompt as a conversation (role, content), where it was one; ``prompt`` is then its readable form."""
        return list(self.provenance.get("messages", []))


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

    @property
    def certainty(self) -> float:
        """How sure it is that a better placed answer is the better, 0.5 to 1."""
        return float(self.comparison.provenance.get("certainty", 1.0))


@dataclass(frozen=True)
class RankedAnswers(Sequences):
    """Reward-model rows: the answers of several comparisons, each comparison's rows adjacent.

    ``group`` i64 (B,): which comparison a row belongs to. ``rank`` i64 (B,): its place there, 0 the best. ``margin``
    and ``certainty`` f32 (B,), the same for all rows of a comparison: by how much scores should differ, and how sure it
    is that the better placed is the better. ``ties``: whether equal places say something (that the scores be equal).
    """

    group: Int[Tensor, " B"]
    rank: Int[Tensor, " B"]
    margin: Float[Tensor, " B"]
    certainty: Float[Tensor, " B"]
    ties: bool = False

    @classmethod
    def pack(cls, rows: Sequence[Sequence[int]], masks: Sequence[Sequence[bool]], **extra: Any) -> Self:
        """As for :class:`Sequences`; margins are 0 and comparisons certain unless said otherwise."""
        plain = {"margin": torch.zeros(len(rows)), "certainty": torch.ones(len(rows))}
        return super().pack(rows, masks, **plain | extra)

    def preferred(self) -> Bool[Tensor, "B B"]:
        """[i, j] is true where rows i and j answer the same question and i is placed before j."""
        return self.together() & (self.rank[:, None] < self.rank[None, :])

    def together(self) -> Bool[Tensor, "B B"]:
        """[i, j] is true where rows i and j answer the same question, i being no other than j included."""
        return self.group[:, None] == self.group[None, :]

    def pairs(self) -> Bool[Tensor, "B B"]:
        """[i, j] is true where i stands against j: placed before it, or beside it where ties say something."""
        pairs = self.preferred()
        if self.ties:
            above = torch.ones_like(pairs).triu(1)
            pairs = pairs | (self.together() & above & (self.rank[:, None] == self.rank[None, :]))
        return pairs

    def targets(self, smoothing: float = 0.0) -> Float[Tensor, "B B"]:
        """[i, j]: the probability that i is better than j, for the pairs; label smoothing moves it towards ½."""
        sure = self.certainty[:, None].expand(len(self), len(self))
        target = torch.where(self.rank[:, None] == self.rank[None, :], 0.5, sure)
        return target * (1 - smoothing) + (1 - target) * smoothing

    def averaged(self, sums: Float[Tensor, " B"], terms: Tensor) -> Float[Tensor, " B"]:
        """Each row's part of its comparison's mean, from the sum over the row's ``terms`` (B,): its pairs or places."""
        return sums / (self.together().float() @ terms.float()).clamp(min=1)

    def weights(self) -> Weights:
        """Each row has its comparison's share of the batch: comparisons that say anything share it by their answers.

        A loss gives a row its part of the comparison's mean, so that the sum over rows is the mean over the batch.
        """
        together = self.together()
        ordered = (together & self.pairs().any(1)[None, :]).any(1)
        size = torch.where(ordered, together.sum(1), 0).float()
        return Weights.alike(size / ordered.sum().clamp(min=1))

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
