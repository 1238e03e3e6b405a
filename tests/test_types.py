"""The records: rows are cut, joined and divided without losing, doubling or mixing any."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import TypeCheckError

from plaudit import ops
from plaudit.types import Demonstrations, Experience, Prompt, RankedAnswers, Rollout, Sequences

lengths_of_rows = st.lists(st.integers(1, 12), min_size=1, max_size=14)


def sequences(lengths: list[int]) -> Sequences:
    """Rows of the given lengths; every token says which row it belongs to."""
    return Sequences.pack([[i + 1] * n for i, n in enumerate(lengths)], [[True] * n for n in lengths])


def rollout(lengths: list[int], start: int = 0) -> Rollout:
    """Answers of the given lengths after prompts of two tokens, every column carrying the row's own number."""
    own = [start + i + 1 for i in range(len(lengths))]
    mask = [[False, False, *[True] * n] for n in lengths]
    rows = [[i] * (n + 2) for i, n in zip(own, lengths, strict=True)]
    packed = Sequences.pack(rows, mask)
    return Rollout(
        packed.tokens, packed.mask, packed.lengths, packed.features,
        logprobs=torch.where(packed.mask, -packed.tokens.float(), 0.0),
        terminated=torch.tensor([i % 2 == 0 for i in own]),
        stopped=torch.zeros(len(packed), dtype=torch.bool),
        version=torch.tensor(own),
        prompts=tuple(Prompt(f"prompt {i}", (i, i)) for i in own),
    )  # fmt: skip


def assert_rows_are_whole(rows: Rollout, own: list[int]):
    """Every column of every row belongs to the row whose number its tokens carry."""
    assert len(rows) == len(own)
    for b, i in enumerate(own):
        n = int(rows.lengths[b])
        assert (rows.tokens[b, :n] == i).all() and (rows.tokens[b, n:] == 0).all()
        assert rows.mask[b].tolist() == [False, False, *[True] * (n - 2), *[False] * (rows.mask.shape[1] - n)]
        assert (rows.logprobs[b][rows.mask[b]] == -i).all()
        assert rows.prompts[b] == Prompt(f"prompt {i}", (i, i))
        assert int(rows.version[b]) == i and bool(rows.terminated[b]) == (i % 2 == 0)


# --- taking, joining, padding -----------------------------------------------------------------------------------------


def test_take_keeps_the_order_asked_for_and_moves_every_column_and_tuple_along():
    rows = rollout([3, 1, 4, 2])
    assert_rows_are_whole(rows.take([2, 0, 0]), [3, 1, 1])
    assert_rows_are_whole(rows.take(torch.tensor([3])), [4])


def test_take_of_nothing_is_an_empty_record():
    assert len(rollout([3, 1]).take([])) == 0


def test_cat_joins_parts_of_different_width_in_order():
    assert_rows_are_whole(Rollout.cat([rollout([1, 2]), rollout([5], 2), rollout([3, 1], 3)]), [1, 2, 3, 4, 5])


@given(st.permutations(range(6)), st.integers(1, 6))
def test_cut_apart_and_joined_again_nothing_is_lost(order: list[int], size: int):
    rows = rollout([3, 1, 4, 2, 7, 1])
    parts = [rows.take(order[i : i + size]).trim() for i in range(0, 6, size)]
    together = Rollout.cat(parts).take(torch.argsort(torch.tensor(order)))
    assert_rows_are_whole(together, [1, 2, 3, 4, 5, 6])


def test_trim_drops_only_columns_that_are_padding_in_every_row():
    rows = rollout([3, 1, 7]).take([0, 1])
    assert rows.tokens.shape[1] == 9
    trimmed = rows.trim()
    assert trimmed.tokens.shape[1] == trimmed.mask.shape[1] == trimmed.logprobs.shape[1] == 5
    assert_rows_are_whole(trimmed, [1, 2])


def test_widen_is_undone_by_trim():
    rows = rollout([3, 1])
    wide = rows.widen(11)
    assert wide.tokens.shape == wide.mask.shape == wide.logprobs.shape == (2, 11)
    assert_rows_are_whole(wide, [1, 2])
    assert torch.equal(wide.trim().tokens, rows.tokens)


def test_features_are_cut_and_widened_with_the_tokens():
    rows = dataclasses.replace(sequences([2, 4]), features=torch.randn(2, 4, 3))
    assert torch.equal(rows.widen(6).features[:, :4], rows.features)
    assert (rows.widen(6).features[:, 4:] == 0).all()
    assert rows.take([0]).trim().features.shape == (1, 2, 3)


def test_records_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        sequences([2]).tokens = torch.zeros(1, 2, dtype=torch.long)  # type: ignore[misc]


def test_columns_of_different_shape_are_refused():
    good = sequences([2, 3])
    with pytest.raises(TypeCheckError):
        dataclasses.replace(good, mask=torch.zeros(2, 4, dtype=torch.bool))
    with pytest.raises(TypeCheckError):
        dataclasses.replace(good, tokens=good.tokens.float())


# --- where a text ends ------------------------------------------------------------------------------------------------


def test_padding_is_never_recognised_by_its_id():
    """Ids of 0 inside a row, and at its end, are tokens like any other: only the length says where padding begins."""
    rows = Sequences.pack([[5, 0, 0], [0], [0, 7]], [[False, True, True], [True], [False, True]])
    assert rows.lengths.tolist() == [3, 1, 2]
    assert rows.text_end().tolist() == [2, 0, 1]
    assert rows.mask.tolist() == [[False, True, True], [True, False, False], [False, True, False]]


def test_the_end_token_counts_as_chosen_but_is_no_part_of_the_text():
    packed = Sequences.pack([[5, 6, 9, 1], [5, 6, 9, 9]], [[False, False, True, True]] * 2)
    rows = Rollout(
        packed.tokens, packed.mask, packed.lengths, packed.features,
        logprobs=torch.zeros(2, 4),
        terminated=torch.tensor([True, False]),
        stopped=torch.zeros(len(packed), dtype=torch.bool),
        version=torch.zeros(2, dtype=torch.long),
        prompts=(Prompt("p", (5, 6)),) * 2,
    )  # fmt: skip
    assert rows.response_lengths().tolist() == [2, 2]
    assert rows.text_end().tolist() == [2, 3]
    assert [rows.response_ids(0), rows.response_ids(1)] == [[9], [9, 9]]


def test_an_answer_that_is_only_an_end_token_has_length_one_and_no_text():
    packed = Sequences.pack([[5, 6, 1]], [[False, False, True]])
    rows = Rollout(
        packed.tokens, packed.mask, packed.lengths, packed.features,
        logprobs=torch.zeros(1, 3),
        terminated=torch.tensor([True]),
        stopped=torch.zeros(len(packed), dtype=torch.bool),
        version=torch.zeros(1, dtype=torch.long),
        prompts=(Prompt("p", (5, 6)),),
    )  # fmt: skip
    assert rows.response_lengths().tolist() == [1]
    assert rows.response_ids(0) == []
    assert rows.text_end().tolist() == [1]


# --- means and micro-batches ------------------------------------------------------------------------------------------


@given(st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=1, max_size=5))
def test_mean_weights_sum_to_one_or_to_zero_and_give_the_mean(mask: list[list[bool]]):
    m = torch.tensor(mask)
    weights = ops.mean_weights(m)
    x = torch.arange(m.numel(), dtype=torch.float32).view(m.shape)
    assert float(weights.sum()) == pytest.approx(1.0 if m.any() else 0.0, abs=1e-6)
    if m.any():
        assert float((x * weights).sum()) == pytest.approx(float(x[m].mean()), abs=1e-4)


def test_the_mean_is_over_tokens_not_a_mean_of_row_means():
    """Token losses [4] and [1, 1, 1]: 1.75; the mean of the rows' means would be 2.5."""
    losses = torch.tensor([[4.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
    rows = Demonstrations.pack([[5], [6, 6, 6]], [[True], [True] * 3])
    experience = Experience.of(
        rollout([1, 3]), **{k: torch.zeros(2, 5) for k in ("logprobs", "values", "advantages", "returns")}
    )
    assert float((losses * rows.weights().main).sum()) == pytest.approx(1.75)
    assert float((losses * experience.weights().main[:, 2:]).sum()) == pytest.approx(1.75)


@given(lengths_of_rows, st.integers(1, 200))
def test_micro_batches_hold_each_row_once_within_the_budget(lengths: list[int], budget: int):
    rows = sequences(lengths)
    parts = [index.tolist() for index in rows.micro_batches(budget)]
    assert sorted(itertools.chain(*parts)) == list(range(len(lengths)))
    for part in parts:
        assert len(part) == 1 or len(part) * max(lengths[i] for i in part) <= budget


# --- ranked answers ---------------------------------------------------------------------------------------------------


def ranked(comparisons: list[list[int]], lengths: list[int] | None = None) -> RankedAnswers:
    """One list of ranks a comparison; the tokens say which comparison a row belongs to."""
    groups = [g for g, ranks in enumerate(comparisons) for _ in ranks]
    sizes = lengths or [2] * len(groups)
    return RankedAnswers.pack(
        [[g + 1] * n for g, n in zip(groups, sizes, strict=True)],
        [[True] * n for n in sizes],
        group=torch.tensor(groups) * 3 + 7,
        rank=torch.tensor(list(itertools.chain(*comparisons))),
    )


comparisons_of_ranks = st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=5), min_size=1, max_size=5)


@given(comparisons_of_ranks)
def test_pair_weights_sum_to_one_and_share_the_batch_by_answers(comparisons: list[list[int]]):
    """A comparison that says something counts by its share of answers, evenly over its pairs; ties count nothing."""
    rows = ranked(comparisons)
    preferred = rows.preferred()
    weights = rows.averaged(rows.weights().main, preferred.sum(1))
    wins = [[sum(a < b for b in ranks) for a in ranks] for ranks in comparisons]
    assert preferred.sum(1).tolist() == list(itertools.chain(*wins))
    said = [any(w) for w in wins]
    answers = sum(len(ranks) for ranks, useful in zip(comparisons, said, strict=True) if useful)
    start = 0
    for ranks, won, useful in zip(comparisons, wins, said, strict=True):
        own = weights[start : start + len(ranks)]
        expected = len(ranks) / answers / sum(won) if useful else 0.0
        assert own.tolist() == pytest.approx([expected] * len(ranks), abs=1e-6)
        start += len(ranks)
    assert float((weights[:, None] * preferred).sum()) == pytest.approx(1.0 if any(said) else 0.0, abs=1e-5)


@settings(max_examples=50)
@given(comparisons_of_ranks, st.integers(1, 120), st.data())
def test_micro_batches_keep_comparisons_whole(comparisons: list[list[int]], budget: int, data: st.DataObject):
    count = sum(map(len, comparisons))
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=count, max_size=count))
    rows = ranked(comparisons, lengths)
    parts = [index.tolist() for index in rows.micro_batches(budget)]
    assert sorted(itertools.chain(*parts)) == list(range(count))
    for part in parts:
        groups = set(rows.group[part].tolist())
        assert len(part) == sum(int(g) in groups for g in rows.group)
        assert len(groups) == 1 or len(part) * max(lengths[i] for i in part) <= budget


def test_micro_batches_see_every_pair_that_the_whole_batch_sees():
    rows = ranked([[0, 1, 1], [0, 1], [1, 0, 2, 2]])
    seen = sum(int(rows.take(index).preferred().sum()) for index in rows.micro_batches(6))
    assert seen == int(rows.preferred().sum()) == 2 + 1 + 5


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a second device")
def test_ranked_answers_can_be_weighed_and_cut_on_another_device():
    rows = ranked([[0, 1, 1], [0, 1]])
    there = rows.to("cuda")
    assert torch.allclose(there.weights().main.cpu(), rows.weights().main)
    assert [i.tolist() for i in there.micro_batches(4)] == [i.tolist() for i in rows.micro_batches(4)]
