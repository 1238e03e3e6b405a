"""A step is a function of its batch: not of how the batch is cut, ordered or padded."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from families import FAMILIES, build

from plaudit.algorithms.reward import ranking_loss
from plaudit.algorithms.sft import sft_loss
from plaudit.config import OptimizerConfig, RewardConfig
from plaudit.errors import NonFinite
from plaudit.learner import Learner, Scorer, weighted
from plaudit.models.arrangements import trainable_top
from plaudit.models.network import LanguageHead, Network, scalar_head, text_scores, token_logprobs, token_values
from plaudit.models.stack import WholeStack
from plaudit.types import Demonstrations, RankedAnswers


def _network(family: str = "llama") -> Network:
    model = build(family, seed=0)
    torch.manual_seed(1)
    return Network(
        WholeStack(model.base_model), LanguageHead(model), scalar_head(torch.randn(1, model.config.hidden_size))
    )


def _rows() -> Demonstrations:
    ids = [[(7 * i + j) % 20 + 2 for j in range(i + 2)] for i in range(8)]
    return Demonstrations.pack(ids, [[False] + [True] * (len(r) - 1) for r in ids])


def _trained(budget: int, rows: Demonstrations, **settings) -> dict[str, torch.Tensor]:
    # in float64: Adam divides by a gradient's size, so that rounding of one near 0 becomes a whole step in float32
    network = _network().double()
    learner = Learner(network, OptimizerConfig(learning_rate=1e-2, micro_batch_tokens=budget, **settings), 3)
    for _ in range(3):
        learner.step(rows, sft_loss)
    return {name: value.clone() for name, value in network.state_dict().items()}


@pytest.mark.parametrize("budget", [1, 9, 30])
def test_micro_batches_change_nothing(budget: int):
    """Case: eight rows of different lengths in one batch or in many micro-batches, three optimizer steps."""
    whole, cut = _trained(10_000, _rows()), _trained(budget, _rows())
    assert all(torch.allclose(whole[k], cut[k], rtol=0, atol=1e-12) for k in whole)


def test_row_order_and_padding_change_nothing():
    rows = _rows()
    other = rows.take([3, 1, 7, 0, 2, 6, 5, 4]).widen(rows.tokens.shape[1] + 5)
    one, two = _trained(10_000, rows), _trained(10_000, other)
    assert all(torch.allclose(one[k], two[k], rtol=0, atol=1e-12) for k in one)


def test_a_mean_is_over_all_tokens_not_over_micro_batches():
    """Token losses [4] and [1, 1, 1] in two micro-batches have the mean 1.75; the mean of means is 2.5."""
    rows = Demonstrations.pack([[2, 3], [2, 3, 4, 5]], [[False, True], [False, True, True, True]])
    fixed = torch.tensor([[0.0, 4.0, 0.0, 0.0], [0.0, 1.0, 1.0, 1.0]])

    def loss(outputs, part, weights):
        row = 1 if part.tokens.shape[1] == 4 else 0
        losses = fixed[row : row + 1, : part.tokens.shape[1]] + 0.0 * token_logprobs(outputs, part)
        return (losses * weights.main).sum(), weighted({"mean": losses}, weights.places)

    learner = Learner(_network(), OptimizerConfig(micro_batch_tokens=4), 1)
    metrics = learner.step(rows, loss)
    assert metrics["loss"] == pytest.approx(1.75)
    assert metrics["mean"] == pytest.approx(1.75)


def test_ranking_steps_do_not_depend_on_the_cut():
    ids = [[3, 4], [5, 6, 7], [8, 9], [4, 4, 4, 4], [9, 2], [3, 3]]
    rows = RankedAnswers.pack(
        ids,
        [[True] * len(r) for r in ids],
        group=torch.tensor([0, 0, 1, 1, 1, 2]),
        rank=torch.tensor([0, 1, 1, 0, 1, 0]),
    )
    results = []
    for budget in (1, 10_000):
        network = _network()
        config = OptimizerConfig(learning_rate=1e-2, eps=1e-4, micro_batch_tokens=budget)
        Learner(network, config, 1).step(rows, ranking_loss(RewardConfig()))
        results.append(network.state_dict())
    assert all(torch.allclose(results[0][k], results[1][k], atol=1e-6) for k in results[0])


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_row_scores_the_same_alone_and_in_a_padded_batch(family: str):
    network, rows = _network(family), _rows()
    for read in (token_logprobs, token_values, text_scores):
        together = Scorer(network, token_budget=10_000).evaluate(rows.widen(20), read)
        for i in range(len(rows)):
            alone = Scorer(network).evaluate(rows.take([i]).trim(), read)
            expected = together[i, : alone.shape[1]] if alone.dim() == 2 else together[i]
            assert torch.allclose(alone[0], expected, atol=1e-5)


def test_the_id_under_the_padding_means_nothing():
    network, rows = _network(), _rows()
    other = copy.deepcopy(rows)
    other.tokens[torch.arange(rows.tokens.shape[1])[None] >= rows.lengths[:, None]] = 13
    for read in (token_logprobs, token_values, text_scores):
        assert torch.allclose(Scorer(network).evaluate(rows, read), Scorer(network).evaluate(other, read), atol=1e-6)


def test_a_loss_that_is_no_number_steps_nothing():
    network = _network()
    learner = Learner(network, OptimizerConfig(learning_rate=1.0), 5)
    learner.step(_rows(), sft_loss)
    before = copy.deepcopy(network.state_dict())

    def broken(outputs, rows, weights):
        return token_logprobs(outputs, rows).sum() * math.nan, {}

    with pytest.raises(NonFinite, match="step 2"):
        learner.step(_rows(), broken)
    assert all(torch.equal(before[k], v) for k, v in network.state_dict().items())
    assert learner.steps == 1


def test_a_step_that_is_left_out_is_counted_and_the_loop_goes_on():
    learner = Learner(_network(), OptimizerConfig(learning_rate=1.0, skip_nonfinite=True), 5)
    before = copy.deepcopy(learner.network.state_dict())

    def broken(outputs, rows, weights):
        return token_logprobs(outputs, rows).sum() * math.nan, {}

    measured = learner.step(_rows(), broken)
    assert measured["skipped"] == 1 and all(math.isfinite(v) for v in measured.values())
    assert (learner.steps, learner.batches) == (0, 1)
    assert all(torch.equal(before[k], v) for k, v in learner.network.state_dict().items())


def test_a_step_that_is_refused_changes_nothing():
    learner = Learner(_network(), OptimizerConfig(learning_rate=1.0), 5)
    before = copy.deepcopy(learner.network.state_dict())
    measured = learner.step(_rows(), sft_loss, veto=lambda seen: seen["nll_nats_per_token"] > 0)
    assert (measured["skipped"], measured["vetoed"], learner.steps) == (1, 1, 0)
    assert all(torch.equal(before[k], v) for k, v in learner.network.state_dict().items())


def test_a_schedule_by_rollouts_holds_its_rate_within_one_however_many_steps_it_has():
    config = OptimizerConfig(learning_rate=1.0, schedule_per="rollout")
    learner = Learner(_network(), config, 8, steps_per_rollout=4)
    rates = []
    for learner.rollouts, steps in ((0, 4), (1, 2)):
        for _ in range(steps):
            rates.append(learner.learning_rate())
            learner.steps += 1
    assert rates == [1.0] * 4 + [0.5] * 2


def test_the_schedule_counts_optimizer_steps():
    """Two steps of warm-up to 1, then linearly to 0 over the remaining four."""
    learner = Learner(_network(), OptimizerConfig(learning_rate=1.0, warmup_steps=2, micro_batch_tokens=4), 6)
    rates = []
    for _ in range(6):
        rates.append(learner.learning_rate())
        learner.steps += 1
    assert rates == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5, 0.25])


def test_a_learner_restored_from_its_state_goes_on_as_if_nothing_had_happened():
    straight = _network()
    learner = Learner(straight, OptimizerConfig(learning_rate=1e-2), 4)
    for _ in range(4):
        learner.step(_rows(), sft_loss)
    first = Learner(_network(), OptimizerConfig(learning_rate=1e-2), 4)
    for _ in range(2):
        first.step(_rows(), sft_loss)
    state = {k: v.clone() for k, v in first.state().items()}
    resumed = _network()
    second = Learner(resumed, OptimizerConfig(learning_rate=1e-2), 4)
    second.load_state(state)
    for _ in range(2):
        second.step(_rows(), sft_loss)
    assert all(torch.equal(straight.state_dict()[k], v) for k, v in resumed.state_dict().items())


@pytest.mark.parametrize("scale", [0.5, 1.0])
def test_the_gradient_through_a_frozen_head_is_autograds(scale: float):
    """A head that is not trained takes a shorter way; both ways give the same numbers and gradients."""
    network, rows = _network(), _rows()
    weight = torch.sin(torch.arange(rows.mask.numel()).view(rows.mask.shape).float())
    results = []
    for frozen in (True, False):
        network.zero_grad()
        network.language.linear.weight.requires_grad_(not frozen)
        outputs = network(rows)
        outputs.hidden.retain_grad()
        logprobs = token_logprobs(outputs, rows, scale)
        (logprobs * weight).sum().backward()
        results.append((logprobs.detach(), outputs.hidden.grad))
    assert torch.allclose(results[0][0], results[1][0], atol=1e-6)
    assert torch.allclose(results[0][1], results[1][1], atol=1e-5)


def _step(stack, trunk, recompute: bool) -> tuple[dict[str, torch.Tensor], int]:
    """The weights after a step, and the bytes that its forward passes kept for their gradients."""
    network = Network(stack, scalar=scalar_head(torch.ones(1, 32)))
    learner = Learner(network, OptimizerConfig(learning_rate=1e-2, gradient_checkpointing=recompute), 1)
    rows = _rows()
    rows = rows if trunk is None else trunk.prepare(rows)
    kept = 0

    def keep(x: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        kept += x.nbytes
        return x

    def loss(outputs, part, weights):
        values = token_values(outputs, part)
        return (values.square() * weights.main).sum(), weighted({"value": values}, weights.places)

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        learner.step(rows, loss)
    return {name: p.detach().clone() for name, p in learner.named.items()}, kept


@pytest.mark.parametrize("blocks", [0, 2])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_checkpointing_keeps_less_and_changes_nothing(family: str, precision: str, blocks: int):
    (plain, much), (again, little) = (
        _step(*trainable_top(build(family).base_model, blocks, precision), recompute) for recompute in (False, True)
    )
    assert plain.keys() == again.keys() and all(torch.equal(plain[k], again[k]) for k in plain)
    assert little < 0.5 * much
