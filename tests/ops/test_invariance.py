"""What may never change a per-token result: values at masked places, the order of rows, the width of the padding."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from plaudit import ops

Columns = dict[str, Tensor]
B, S = 5, 8


def columns() -> Columns:
    """A batch of per-token columns (double, so that only mistakes show) and its mask, with holes and an empty row."""
    g = torch.Generator().manual_seed(4)
    names = ("logprobs", "ref_logprobs", "values", "rewards")
    made = {name: torch.randn(B, S, generator=g, dtype=torch.float64) for name in names}
    mask = torch.rand(B, S, generator=g) < 0.6
    mask[1], mask[3] = False, True
    return made | {"mask": mask, "scores": torch.randn(B, generator=g, dtype=torch.float64)}


def through_all(c: Columns) -> tuple[Tensor, ...]:
    """The way from scores to whitened advantages, as PPO goes it."""
    rewards = ops.token_rewards(c["scores"], c["logprobs"], c["ref_logprobs"], c["mask"], kl_coef=0.1, estimator="k3")
    advantages, returns = ops.gae(rewards, c["values"], c["mask"], gamma=0.97, lam=0.9)
    return rewards, ops.whiten(advantages, c["mask"]), returns


PER_TOKEN: dict[str, Callable[[Columns], tuple[Tensor, ...]]] = {
    "gae": lambda c: ops.gae(c["rewards"], c["values"], c["mask"], gamma=0.97, lam=0.9),
    "whiten": lambda c: (ops.whiten(c["rewards"], c["mask"]),),
    "whiten, mean kept": lambda c: (ops.whiten(c["rewards"], c["mask"], unbiased=True, keep_mean=True),),
    "token_rewards": lambda c: (
        ops.token_rewards(c["scores"], c["logprobs"], c["ref_logprobs"], c["mask"], kl_coef=0.1),
    ),
    "all": through_all,
}


def same(mine: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> bool:
    return all(torch.allclose(a, b, atol=1e-12, rtol=0) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("garbage", [1e6, float("nan"), float("inf")])
@pytest.mark.parametrize("name", PER_TOKEN)
def test_values_at_masked_places_never_matter(name: str, garbage: float):
    clean = columns()
    dirty = {k: torch.where(clean["mask"], v, garbage) if v.dtype == torch.float64 and v.dim() == 2 else v
             for k, v in clean.items()}  # fmt: skip
    assert same(PER_TOKEN[name](clean), PER_TOKEN[name](dirty))


@pytest.mark.parametrize("name", PER_TOKEN)
def test_rows_may_come_in_any_order(name: str):
    order = torch.tensor([3, 0, 4, 2, 1])
    expected = tuple(x[order] for x in PER_TOKEN[name](columns()))
    assert same(expected, PER_TOKEN[name]({k: v[order] for k, v in columns().items()}))


@pytest.mark.parametrize("name", PER_TOKEN)
def test_padding_to_a_wider_row_changes_nothing(name: str):
    wide = {k: pad(v, (0, 3), value=7 if v.dtype == torch.float64 else 0) if v.dim() == 2 else v
            for k, v in columns().items()}  # fmt: skip
    results = PER_TOKEN[name](wide)
    assert same(PER_TOKEN[name](columns()), tuple(x[:, :S] for x in results))
    assert all((x[:, S:] == 0).all() for x in results)


def test_rows_do_not_reach_each_other_before_whitening():
    """Changing one row's score moves that row's advantages only."""
    before, after = columns(), columns()
    after["scores"][3] += 5
    for mine, theirs in zip(through_all(before)[::2], through_all(after)[::2], strict=True):
        moved = (mine != theirs).any(1)
        assert moved.tolist() == [False, False, False, True, False]


def test_sequence_kl_and_means_ignore_masked_places():
    clean = columns()
    dirty = {k: torch.where(clean["mask"], v, float("nan")) for k, v in clean.items() if k.endswith("logprobs")}
    mask = clean["mask"]
    assert torch.equal(
        ops.sequence_kl(clean["logprobs"], clean["ref_logprobs"], mask),
        ops.sequence_kl(dirty["logprobs"], dirty["ref_logprobs"], mask),
    )
    assert torch.equal(ops.masked_mean(clean["logprobs"], mask), ops.masked_mean(dirty["logprobs"], mask))
    assert float(ops.masked_mean(clean["logprobs"], mask)) == pytest.approx(float(clean["logprobs"][mask].mean()))
    assert float(ops.masked_mean(clean["logprobs"], torch.zeros_like(mask))) == 0


def test_last_true_marks_one_place_in_every_row_that_has_one():
    mask = torch.tensor([[True, False, True, False], [False] * 4, [True] * 4, [False, True, False, False]])
    marked = [[False, False, True, False], [False] * 4, [False, False, False, True], [False, True, False, False]]
    assert ops.last_true(mask).tolist() == marked
