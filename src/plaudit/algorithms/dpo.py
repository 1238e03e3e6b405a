"""DPO: preferences without a reward model. Rafailov et al. 2023, on the learner that everything else uses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from plaudit import ops
from plaudit.data.order import shuffled
from plaudit.learner import Loss, Stats, weighted
from plaudit.models.network import Outputs, token_logprobs
from plaudit.tokenizer import Tokenizer
from plaudit.types import Preference, Sequences, Weights


@dataclass(frozen=True)
class Pairs(Sequences):
    """Two rows a pair, the chosen one first: row 2i is better than row 2i + 1. ``mask`` marks the answers' tokens.

    ``ref_answer_logprobs`` f32 (B,): the reference's log-probability of each answer, summed over its tokens;
    ``certainty`` f32 (B,): how sure it is that the chosen one is better, the same for both rows of a pair.
    """

    ref_answer_logprobs: Float[Tensor, " B"]
    certainty: Float[Tensor, " B"]

    def weights(self) -> Weights:
        """Each chosen row bears its pair's loss."""
        pairs = torch.zeros(len(self))
        pairs[::2] = 2 / max(1, len(self))
        return Weights.alike(pairs)

    def micro_batches(self, token_budget: int) -> Iterator[Int[Tensor, " N"]]:
        """Whole pairs at a time, the longest first."""
        longest = self.lengths.view(-1, 2).amax(1)
        pairs = Sequences(self.tokens[::2], self.mask[::2], longest, self.features[::2])
        for index in pairs.micro_batches(token_budget // 2):
            yield torch.stack([2 * index, 2 * index + 1], 1).flatten()


def pairs_of(
    preferences: Sequence[Preference], tokenizer: Tokenizer, max_length: int, max_pairs: int, seed: int
) -> tuple[Pairs, int]:
    """Every ordered pair of each preference (at most ``max_pairs`` of them, drawn), as rows of prompt and answer.

    An answer that its author ended closes with the end token, so that ending is learned too. What is longer than
    ``max_length`` loses its beginning; pairs that are equal after that are left out, and counted beside.
    """
    ids, masks, certainties, equal = [], [], [], 0
    for number, p in enumerate(preferences):
        prompt = tokenizer.asked_ids(p.comparison)
        rows = []
        for answer in p.comparison.answers:
            text = tokenizer.scored_ids(prompt, answer.text) + [*tokenizer.end_ids[:1]] * answer.ended
            rows.append((text[-max_length:], [i >= len(prompt) for i in range(len(text))][-max_length:]))
        places = range(len(rows))
        preferred = [(i, j) for i in places for j in places if p.ranks[i] < p.ranks[j]]
        ordered = [(i, j) for i, j in preferred if rows[i] != rows[j]]
        equal += len(preferred) - len(ordered)
        for at in shuffled(len(ordered), seed, number)[:max_pairs]:
            for row, mask in (rows[side] for side in ordered[at]):
                ids.append(row)
                masks.append(mask)
                certainties.append(p.certainty)
    return Pairs.pack(ids, masks, ref_answer_logprobs=torch.zeros(len(ids)), certainty=torch.tensor(certainties)), equal


def answer_logprobs(outputs: Outputs, rows: Sequences) -> Float[Tensor, " B"]:
    """log π(answer | prompt) of each row, summed over its masked tokens."""
    return token_logprobs(outputs, rows).sum(1)


def dpo_loss(beta: float, label_smoothing: float = 0.0) -> Loss:
    """−log σ(β(log ratio of the chosen − log ratio of the rejected)), ratios against the reference; equation 7."""

    def loss(outputs: Outputs, rows: Sequences, weights: Weights) -> tuple[Tensor, Stats]:
        assert isinstance(rows, Pairs)
        gained = beta * (answer_logprobs(outputs, rows) - rows.ref_answer_logprobs)
        chosen, rejected = gained[::2], gained[1::2]
        sure = rows.certainty[::2]
        losses = ops.bradley_terry(chosen, rejected, target=sure * (1 - label_smoothing) + (1 - sure) * label_smoothing)
        weight = weights.main[::2]
        stats = {"accuracy": (chosen > rejected).float(), "margin": chosen - rejected, "chosen_reward": chosen}
        return (losses * weight).sum(), weighted(stats, weight)

    return loss
