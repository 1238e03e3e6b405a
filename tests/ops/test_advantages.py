"""n-step sums, groups, dense rewards, penalties, exact KL: against definitions and hand-computed numbers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plaudit import ops

R, V = torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([[0.5, 0.25, 0.125]])
ALL = torch.ones(1, 3, dtype=torch.bool)


@pytest.mark.parametrize(
    ("n", "advantages"),
    [
        (1, [1 + 0.25 - 0.5, 2 + 0.125 - 0.25, 4 - 0.125]),
        (2, [1 + 2 + 0.125 - 0.5, 2 + 4 - 0.25, 4 - 0.125]),
        (3, [7 - 0.5, 6 - 0.25, 4 - 0.125]),
        (1000, [7 - 0.5, 6 - 0.25, 4 - 0.125]),
    ],
)
def test_n_step_hand_computed(n: int, advantages: list[float]):
    made, returns = ops.n_step(R, V, ALL, n=n)
    assert made[0].tolist() == pytest.approx(advantages)
    assert torch.allclose(returns, made + V)


rows = st.lists(st.tuples(st.floats(-2, 2), st.floats(-2, 2), st.booleans()), min_size=1, max_size=7)


@settings(max_examples=60)
@given(rows, st.floats(0.5, 1.0), st.floats(-1, 1))
def test_n_step_ends_are_gaes_ends(row, gamma: float, after: float):
    """λ = 0 is one step and λ = 1 all of them, with holes in the mask and with a bootstrap."""
    r, v, m = (torch.tensor([x]) for x in zip(*row, strict=True))
    r, v, b = r.float(), v.float(), torch.tensor([after])
    for n, lam in ((1, 0.0), (len(row) + 3, 1.0)):
        mine = ops.n_step(r, v, m, n=n, gamma=gamma, bootstrap=b)
        theirs = ops.gae(r, v, m, gamma=gamma, lam=lam, bootstrap=b)
        for a, c in zip(mine, theirs, strict=True):
            assert torch.allclose(torch.where(m, a, 0.0), torch.where(m, c, 0.0), atol=1e-4)


def test_n_step_passes_over_what_the_policy_did_not_choose():
    mask = torch.tensor([[True, False, True, True]])
    wide = torch.tensor([[1.0, 99.0, 2.0, 4.0]]), torch.tensor([[0.5, 77.0, 0.25, 0.125]])
    made, _ = ops.n_step(*wide, mask, n=2)
    narrow, _ = ops.n_step(R, V, ALL, n=2)
    assert torch.allclose(made[mask], narrow[0]) and made[0, 1] == 0


def test_n_step_of_none_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        ops.n_step(R, V, ALL, n=0)


def test_discounted_sums():
    assert ops.discounted_sums(R, ALL, gamma=0.5)[0].tolist() == [1 + 1 + 1, 2 + 2, 4]
    assert ops.discounted_sums(R, ALL, gamma=0.5, bootstrap=torch.tensor([8.0]))[0].tolist() == [4, 6, 8]


def test_groups_as_reported():
    """Scores [1, 0, 0, 1]: GRPO ± 0.866025 by the unbiased deviation, leave-one-out ± 0.666667; equal scores: zeros."""
    scores = torch.tensor([1.0, 0.0, 0.0, 1.0])
    signs = torch.tensor([1.0, -1.0, -1.0, 1.0])
    assert torch.allclose(ops.group_normalised(scores, 4), 0.866025 * signs, atol=1e-5)
    assert torch.allclose(ops.leave_one_out(scores, 4), 0.666667 * signs, atol=1e-5)
    same = torch.full((4,), 0.1)
    for made in (ops.group_normalised(same, 4), ops.leave_one_out(same, 4)):
        assert torch.isfinite(made).all() and made.abs().max() < 1e-6
    assert ops.equal_groups(torch.cat([scores, same]), 4).tolist() == [False, True]


def test_groups_are_apart_and_whole():
    one, two = torch.tensor([1.0, 3.0]), torch.tensor([10.0, 30.0])
    both = ops.leave_one_out(torch.cat([one, two]), 2)
    assert both.tolist() == [-2, 2, -20, 20]
    for size in (1, 3):
        with pytest.raises(ValueError, match="groups"):
            ops.leave_one_out(torch.cat([one, two]), size)


@given(st.lists(st.booleans(), min_size=3, max_size=8))
def test_dense_rewards_sum_to_the_last_prefixs_score(chosen: list[bool]):
    mask = torch.tensor([chosen])
    scores = torch.randn(1, len(chosen), generator=torch.Generator().manual_seed(sum(chosen)))
    rewards = ops.dense_rewards(scores, mask)
    last = scores[mask][-1:].sum()
    assert float(rewards.sum()) == pytest.approx(float(last), abs=1e-5)
    assert not rewards[~mask].any()


def test_dense_rewards_are_what_each_token_changes():
    scores = torch.tensor([[9.0, 0.5, 2.0, 1.0]])
    mask = torch.tensor([[False, True, True, True]])
    assert ops.dense_rewards(scores, mask)[0].tolist() == [0, 0.5, 1.5, -1.0]


def test_penalties_of_unended_answers_and_of_length():
    """An unended answer of score 2 keeps 1 where 1 is taken off, −1 where the penalty replaces; an ended one 2."""
    scores, ended, lengths = torch.tensor([2.0, 2.0]), torch.tensor([False, True]), torch.tensor([4, 2])
    assert ops.penalise(scores, ended, lengths, truncation_penalty=1.0).tolist() == [1, 2]
    assert ops.penalise(scores, ended, lengths, truncation="replace", truncation_penalty=1.0).tolist() == [-1, 2]
    assert ops.penalise(scores, ended, lengths, length_penalty=0.25).tolist() == [1, 1.5]


def test_running_moments_are_those_of_everything_seen():
    g = torch.Generator().manual_seed(0)
    parts = [torch.randn(n, generator=g) * 3 + 5 for n in (1, 7, 20)]
    moments = ops.Moments()
    for part in parts:
        moments = moments.merged(part)
    everything = torch.cat(parts)
    normal = moments.normalise(everything)
    assert float(normal.mean()) == pytest.approx(0, abs=1e-5)
    assert float(normal.std(unbiased=False)) == pytest.approx(1, abs=1e-5)


def test_truncated_importance():
    ours, engine = torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([-1.0, -3.0, 0.0])
    assert ops.truncated_importance(ours, engine, 2.0).tolist() == pytest.approx([1.0, 2.0, math.exp(-1)])


# --- KL in the loss ---------------------------------------------------------------------------------------------------


def test_full_kl_is_the_sum_over_the_vocabulary():
    logits, ref = torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([[0.0, 0.0, 0.0]])
    p = torch.softmax(logits, -1)[0]
    expected = sum(float(x) * math.log(float(x) * 3) for x in p)
    assert ops.full_kl(logits, ref).item() == pytest.approx(expected, abs=1e-6)
    assert ops.full_kl(logits, logits + 7).item() == pytest.approx(0, abs=1e-6)
    masked = torch.tensor([[2.0, 1.0, -torch.inf]])
    assert math.isfinite(ops.full_kl(masked, masked).item())


def _exact(logits: torch.Tensor, ref: torch.Tensor) -> float:
    return float(ops.full_kl(logits, ref).mean())


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs", "full"])
@pytest.mark.parametrize("seed", range(3))
def test_one_step_on_the_kl_term_alone_lowers_the_kl(estimator: str, seed: int):
    """The gradient is that of the KL whatever value is reported; a policy far from its reference comes closer."""
    g = torch.Generator().manual_seed(seed)
    ref = torch.randn(1, 6, generator=g)
    logits = (ref + torch.randn(1, 6, generator=g)).requires_grad_()
    drawn = torch.multinomial(torch.softmax(logits.detach(), -1)[0], 4000, replacement=True, generator=g)
    if estimator == "full":
        loss = ops.full_kl(logits, ref).mean()
    else:
        logprobs = torch.log_softmax(logits, -1)[0, drawn]
        ref_logprobs = torch.log_softmax(ref, -1)[0, drawn]
        loss = ops.kl_loss(logprobs, logprobs.detach(), ref_logprobs, estimator).mean()
        assert loss.item() == pytest.approx(ops.kl_estimate(logprobs, ref_logprobs, estimator).mean().item(), abs=1e-5)
    loss.backward()
    exact = torch.autograd.grad(ops.full_kl(logits, ref).mean(), logits)[0]
    assert logits.grad is not None
    assert torch.cosine_similarity(logits.grad, exact) > 0.97
    assert _exact(logits.detach() - 0.5 * logits.grad, ref) < _exact(logits.detach(), ref)
