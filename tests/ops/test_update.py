"""The clipped losses of PPO: their numbers, where they have no gradient, and the temperature they see."""

from __future__ import annotations

import math

import pytest
import torch
from families import build

from plaudit import ops
from plaudit.models.network import LanguageHead, Network, Outputs, token_policy
from plaudit.models.stack import WholeStack
from plaudit.rollout.sampling import sample
from plaudit.types import Sequences


@pytest.mark.parametrize(
    ("advantage", "ratio", "expected"), [(1.0, 1.5, -1.2), (-1.0, 1.5, 1.5), (1.0, 0.5, -0.5), (-1.0, 0.5, 0.8)]
)
def test_policy_loss_hand_computed(advantage: float, ratio: float, expected: float):
    loss = ops.policy_loss(torch.tensor([math.log(ratio)]), torch.zeros(1), torch.tensor([advantage]), 0.2)
    assert loss.item() == pytest.approx(expected)


def test_policy_gradient_is_zero_exactly_beyond_the_clip_in_the_good_direction():
    """Zero where A > 0 and ρ > 1 + ε, or A < 0 and ρ < 1 − ε; −ρA everywhere else."""
    ratios, advantages = torch.meshgrid(
        torch.tensor([0.3, 0.7, 0.79, 0.81, 1.0, 1.19, 1.21, 1.5, 3.0]),
        torch.tensor([-2.0, -0.1, 0.1, 2.0]),
        indexing="ij",
    )
    logprobs = ratios.log().requires_grad_(True)
    old = torch.zeros_like(ratios)
    ops.policy_loss(logprobs, old, advantages, 0.2).sum().backward()
    beyond = ((advantages > 0) & (ratios > 1.2)) | ((advantages < 0) & (ratios < 0.8))
    assert logprobs.grad is not None
    assert (logprobs.grad[beyond] == 0).all()
    assert torch.allclose(logprobs.grad[~beyond], (-ratios * advantages)[~beyond])
    assert torch.equal(ops.policy_clipped(logprobs.detach(), old, advantages, 0.2), beyond)


def test_policy_gradient_at_ratio_one_is_the_plain_policy_gradient():
    advantages = torch.randn(6, generator=torch.Generator().manual_seed(0))
    logprobs = torch.full((6,), -1.3, requires_grad=True)
    ops.policy_loss(logprobs, logprobs.detach(), advantages).sum().backward()
    assert logprobs.grad is not None
    assert torch.allclose(logprobs.grad, -advantages)


def test_value_loss_hand_computed():
    """Old 0, new 1, return 2, ε 0.2: the clipped value 0.2 is further from the return, so it counts."""
    one = ops.value_loss(torch.tensor([1.0]), torch.tensor([0.0]), torch.tensor([2.0]), 0.2)
    assert one.item() == pytest.approx(1.62)


def test_value_loss_unclipped_is_half_the_squared_error():
    one = ops.value_loss(torch.tensor([1.0]), torch.tensor([0.0]), torch.tensor([3.0]), None)
    assert one.item() == pytest.approx(2.0)


def test_value_clip_takes_the_worse_of_both_errors_and_never_helps():
    g = torch.Generator().manual_seed(0)
    values, old, returns = torch.randn(3, 200, generator=g)
    clipped = ops.value_loss(values, old, returns, 0.2)
    plain = ops.value_loss(values, old, returns, None)
    assert (clipped >= plain).all() and (clipped > plain).any()
    near = (values - old).abs() <= 0.2
    assert torch.allclose(clipped[near], plain[near], atol=1e-6)


def test_value_gradient_is_zero_where_the_clipped_error_is_the_worse_one():
    """Old 0, ε 0.2, return 2: a step of 1 towards the return is more than one update may take."""
    values = torch.tensor([1.0], requires_grad=True)
    ops.value_loss(values, torch.tensor([0.0]), torch.tensor([2.0]), 0.2).sum().backward()
    assert values.grad is not None and values.grad.item() == 0


def test_temperature_is_the_same_in_rollout_and_update():
    """Logits [2, 1, 0], token 0, temperature 0.5: −0.142932 in both; the raw −0.407606 would be a ratio of 0.767456."""
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    token, rollout = sample(logits / 0.5, torch.tensor([0.0]))
    assert token.item() == 0
    model = build("llama")
    model.set_output_embeddings(torch.nn.Linear(3, 3, bias=False))
    torch.nn.init.eye_(model.get_output_embeddings().weight)
    rows = Sequences.pack([[2, 0]], [[False, True]])
    hidden = torch.stack([logits[0], torch.zeros(3)])[None]
    outputs = Outputs(hidden, Network(WholeStack(model.base_model), LanguageHead(model)))
    update, _ = token_policy(outputs, rows, 0.5)
    assert rollout.item() == pytest.approx(-0.142932, abs=1e-6)
    assert update[0].tolist() == pytest.approx([0.0, -0.142932], abs=1e-6)
    raw, _ = token_policy(outputs, rows, 1.0)
    assert raw[0, 1].item() == pytest.approx(-0.407606, abs=1e-6)
    assert math.exp(raw[0, 1].item() - rollout.item()) == pytest.approx(0.767456, abs=1e-6)


def test_logprobs_and_entropy_are_those_of_the_categorical_distribution():
    g = torch.Generator().manual_seed(0)
    logits, chosen = torch.randn(7, 13, generator=g) * 4, torch.randint(13, (7,), generator=g)
    logprobs, entropy = ops.logprobs_and_entropy(logits, chosen)
    reference = torch.distributions.Categorical(logits=logits)
    assert torch.allclose(logprobs, reference.log_prob(chosen), atol=1e-5)
    assert torch.allclose(entropy, reference.entropy(), atol=1e-5)


def test_uniform_logits_have_the_largest_entropy():
    _, entropy = ops.logprobs_and_entropy(torch.zeros(1, 8), torch.tensor([3]))
    assert entropy.item() == pytest.approx(math.log(8))
