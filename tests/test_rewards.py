"""Reward functions: every score belongs to its own row, and what is no score is refused by name and row."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from plaudit.errors import ConfigError
from plaudit.recipes.common import watch
from plaudit.rewards.function import FunctionReward, RewardError, is_function, load_function, vowels
from plaudit.tokenizer import Tokenizer
from plaudit.types import Prompt, Rollout

END = 1
PROMPTS = ["a", "bcd", "ef", "ghijk"]


def rollout(
    tokenizer: Tokenizer, prompts: list[Prompt], answers: list[str], terminated: list[bool] | None = None
) -> Rollout:
    ended = terminated or [True] * len(prompts)
    tails = [[*tokenizer.answer_ids(a), *([END] if e else [])] for a, e in zip(answers, ended, strict=True)]
    rows = [[*p.ids, *t] for p, t in zip(prompts, tails, strict=True)]
    return Rollout.pack(
        rows,
        [[False] * len(p.ids) + [True] * len(t) for p, t in zip(prompts, tails, strict=True)],
        logprobs=torch.zeros(len(rows), max(map(len, rows))),
        terminated=torch.tensor(ended),
        version=torch.zeros(len(rows), dtype=torch.long),
        prompts=tuple(prompts),
    )


def four(tokenizer: Tokenizer, columns: list[dict[str, Any]] | None = None) -> Rollout:
    given = columns or [{} for _ in PROMPTS]
    prompts = [tokenizer.prompt(text, c) for text, c in zip(PROMPTS, given, strict=True)]
    return rollout(tokenizer, prompts, ["w", "xx", "", "zzzz"])


# --- whose score ------------------------------------------------------------------------------------------------------


def test_the_length_of_the_prompt_is_paid_to_the_row_of_that_prompt_in_whatever_order(tokenizer: Tokenizer):
    """Rewards follow their rows through shuffling, sorting by length, cutting and joining."""
    reward = FunctionReward(lambda prompts, responses: [len(p) for p in prompts], tokenizer, "length")
    whole = four(tokenizer)
    assert reward.score(whole).tolist() == [1, 3, 2, 5]
    for order in ([3, 1, 0, 2], torch.argsort(whole.lengths).tolist(), [2, 2, 0]):
        expected = [len(PROMPTS[i]) for i in order]
        assert reward.score(whole.take(order)).tolist() == expected
        assert reward.score(whole.take(order).trim()).tolist() == expected
    joined = Rollout.cat([whole.take([2, 3]), whole.take([1])])
    assert reward.score(joined).tolist() == [2, 5, 3]


def test_the_function_sees_texts_without_end_token_or_padding(tokenizer: Tokenizer):
    seen: dict[str, list[str]] = {}

    def look(prompts: list[str], responses: list[str]) -> list[float]:
        seen.update(prompts=list(prompts), responses=list(responses))
        return [0.0] * len(prompts)

    prompts = [tokenizer.prompt(text) for text in ("p", "äq")]
    FunctionReward(look, tokenizer).score(rollout(tokenizer, prompts, ["one", "zwö"], [True, False]))
    assert seen == {"prompts": ["p", "äq"], "responses": ["one", "zwö"]}


def test_columns_are_passed_as_lists_in_the_rows_order_with_none_where_a_row_lacks_one(tokenizer: Tokenizer):
    columns = [{"answer": 10, "topic": "a"}, {"answer": 30}, {"answer": 20, "topic": "c"}, {"answer": 50}]
    seen: dict[str, list[Any]] = {}

    def look(prompts: list[str], responses: list[str], **given: list[Any]) -> list[float]:
        seen.update(given)
        return [float(a) for a in given["answer"]]

    reward = FunctionReward(look, tokenizer)
    assert reward.score(four(tokenizer, columns)).tolist() == [10, 30, 20, 50]
    assert seen == {"answer": [10, 30, 20, 50], "topic": ["a", None, "c", None]}
    assert reward.score(four(tokenizer, columns).take([3, 0, 2])).tolist() == [50, 10, 20]


def test_a_function_gets_only_the_columns_it_names(tokenizer: Tokenizer):
    columns = [{"answer": i, "topic": "t"} for i in range(4)]
    by_name = FunctionReward(lambda prompts, responses, answer: answer, tokenizer)
    assert by_name.score(four(tokenizer, columns)).tolist() == [0, 1, 2, 3]
    assert (
        FunctionReward(lambda prompts, responses: [1] * 4, tokenizer).score(four(tokenizer, columns)).tolist()
        == [1] * 4
    )


def test_a_function_that_disturbs_its_lists_disturbs_no_row(tokenizer: Tokenizer):
    def shuffle(prompts: list[str], responses: list[str]) -> list[float]:
        scores = [float(len(p)) for p in prompts]
        random.Random(0).shuffle(prompts)
        responses.clear()
        return scores

    rows = four(tokenizer)
    reward = FunctionReward(shuffle, tokenizer)
    assert reward.score(rows).tolist() == reward.score(rows).tolist() == [1, 3, 2, 5]
    assert [p.text for p in rows.prompts] == PROMPTS


@pytest.mark.parametrize("kind", [tuple, iter, torch.tensor, lambda s: torch.tensor(s).numpy()])
def test_scores_may_come_as_any_sequence_of_numbers(tokenizer: Tokenizer, kind: Callable[[list[float]], Any]):
    scores = FunctionReward(lambda prompts, responses: kind([0.5, 1.0, -2.0, 0.0]), tokenizer).score(four(tokenizer))
    assert scores.dtype == torch.float32 and scores.tolist() == [0.5, 1.0, -2.0, 0.0]


def repr_short(value: Any) -> str:
    return repr(value)[:8]


# --- what is no score -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 3, 5, 8])
def test_another_number_of_scores_than_rows_is_refused_not_broadcast(tokenizer: Tokenizer, count: int):
    def wrong(prompts: list[str], responses: list[str]) -> list[float]:
        return [1.0] * count

    with pytest.raises(RewardError, match=f"wrong returned {count} values for 4 rows"):
        FunctionReward(wrong, tokenizer).score(four(tokenizer))


class NoNumber:
    def __float__(self) -> float:
        raise RuntimeError("no number")


BAD = [None, math.nan, math.inf, -math.inf, "1.0", [1.0], 1j, 1e39, 10**400, NoNumber()]


@pytest.mark.parametrize("bad", BAD, ids=repr_short)
def test_a_score_that_is_no_finite_number_is_refused_with_function_and_row(tokenizer: Tokenizer, bad: Any):
    def wrong(prompts: list[str], responses: list[str]) -> list[Any]:
        return [1.0, 2.0, bad, 4.0]

    with pytest.raises(RewardError, match=r"wrong .*row 2\b"):
        FunctionReward(wrong, tokenizer).score(four(tokenizer))


@pytest.mark.parametrize("what", [None, 1.0, {0: 1.0, 1: 1.0, 2: 1.0, 3: 1.0}, "abcd"], ids=repr_short)
def test_a_function_that_returns_no_sequence_of_scores_is_named(tokenizer: Tokenizer, what: Any):
    def single(prompts: list[str], responses: list[str]) -> Any:
        return what

    with pytest.raises(RewardError, match=f"single returned {type(what).__name__} for 4 rows; return one number a row"):
        FunctionReward(single, tokenizer).score(four(tokenizer))


@pytest.mark.parametrize("what", ["None", "{0: 1.0}", "2.0"])
def test_so_is_a_judge(tmp_path, what: str):
    (tmp_path / "mine.py").write_text(f"def judge(prompts, responses):\n    return {what}\n")
    with pytest.raises(RewardError, match=r"judge .*mine\.py:judge returned .* for 1 rows; return one number a row"):
        watch(f"{tmp_path}/mine.py:judge")(["a"], ["b"])


def test_a_function_that_raises_is_named_with_what_it_raised(tokenizer: Tokenizer):
    def breaks(prompts: list[str], responses: list[str]) -> list[float]:
        raise KeyError("gold")

    with pytest.raises(RewardError, match=r"breaks.*KeyError.*gold") as error:
        FunctionReward(breaks, tokenizer).score(four(tokenizer))
    assert isinstance(error.value.__cause__, KeyError)


def test_a_function_that_raises_because_of_one_row_is_named_with_that_row(tokenizer: Tokenizer):
    def breaks(prompts: list[str], responses: list[str]) -> list[float]:
        return [1 / len(r) for r in responses]

    with pytest.raises(RewardError, match=r"breaks.*row 2\b"):
        FunctionReward(breaks, tokenizer).score(four(tokenizer))


# --- finding the function ---------------------------------------------------------------------------------------------


def test_a_function_is_found_in_a_file_and_in_a_module(tmp_path: Path):
    (tmp_path / "mine.py").write_text("def length(prompts, responses):\n    return [len(r) for r in responses]\n")
    assert load_function(f"{tmp_path / 'mine.py'}:length")(["p"], ["four"]) == [4]
    assert load_function("plaudit.rewards.function:vowels") is vowels


@pytest.mark.parametrize(
    ("content", "name", "said"),
    [
        ("x = 1\n", "length", "length"),
        ("length = 3\n", "length", "length"),
        ("def length(:\n", "length", "cannot be imported"),
        ("import no_such_module_anywhere\n", "length", "no_such_module_anywhere"),
        ("1 / 0\n", "length", "division"),
        ("undefined_name\n", "length", "undefined_name"),
    ],
)
def test_a_file_without_the_function_or_that_cannot_be_imported_is_named(
    tmp_path: Path, content: str, name: str, said: str
):
    (tmp_path / "mine.py").write_text(content)
    with pytest.raises(ConfigError, match=said) as error:
        load_function(f"{tmp_path / 'mine.py'}:{name}")
    assert "mine.py" in str(error.value)


@pytest.mark.parametrize(
    "spec",
    ["absent.py:f", "no_such_module_anywhere:f", "plaudit.rewards.function:absent", ".relative:f", "no/module:f"],
)
def test_what_names_no_function_is_an_error_that_repeats_it(spec: str):
    with pytest.raises(ConfigError) as error:
        load_function(spec)
    assert spec in str(error.value)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("mine.py:length", True),
        ("/deep/mine.py:length", True),
        ("package.module:length", True),
        ("C:\\deep\\mine.py:length", True),
        ("runs/reward/model", False),
        ("C:\\runs\\reward", False),
        ("C:model", False),
        ("owner/model", False),
        ("mine.py:", False),
        (":length", False),
    ],
)
def test_functions_are_told_from_model_folders(spec: str, expected: bool):
    assert is_function(spec) is expected


def test_vowels_counts_the_share_of_vowels_and_survives_an_empty_answer():
    assert vowels(["p"] * 3, ["aEio", "", "bab"]) == pytest.approx([1.0, 0.0, 1 / 3])
