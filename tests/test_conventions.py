"""The named conventions give the numbers that the systems' own code gave, and every choice in them is felt."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from plaudit import conventions, ops, vectors
from plaudit.cli import main
from plaudit.conventions import PRESETS, Conventions, Hyper, KLClamp, Whitening, assign_credit
from plaudit.errors import DataError
from plaudit.vectors import check

RECORDED = Path(__file__).parent / "fixtures" / "recorded_numbers.json"
CASES = json.loads(RECORDED.read_text())


def _write(tmp_path: Path, cases) -> str:
    file = tmp_path / "cases.json"
    file.write_text(json.dumps(cases))
    return str(file)


def test_recorded_numbers_are_reproduced(capsys):
    assert main(["vectors", str(RECORDED)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in said} >= set(PRESETS) - {"plaudit"}
    assert all(line.endswith("ok") for line in said)


#: a choice of each system that its numbers depend on, and another value of it
DEVIATIONS = [
    ("ziegler19", "reward_whitening", Whitening("row", unbiased=True, keep_mean=True)),
    ("ziegler19", "advantage_whitening", Whitening("row", unbiased=True)),
    ("ziegler19", "advantage_whitening", None),
    ("trl-0.7", "score_position", "after_end"),
    ("trl-0.7", "reward_whitening", Whitening(unbiased=True, keep_mean=True)),
    ("trl-0.7", "reward_whitening", Whitening(keep_mean=True, reset=False)),
    ("trl-0.7", "advantage_whitening", Whitening()),
    ("trl-0.7", "skip_above_mean_ratio", None),
    ("trl-0.7", "values_over", "one_after"),
    ("trl-1", "score_position", "last"),
    ("trl-1", "score_position", "row_end"),
    ("trl-1", "values_over", "response"),
    ("trl-1", "credit_over", "response"),
    ("trl-1", "value_loss_over", "response"),
    ("trl-1", "reward_whitening", Whitening(unbiased=True, keep_mean=True)),
    ("deepspeed-chat", "score_position", "last"),
    ("deepspeed-chat", "kl_over", "response"),
    ("deepspeed-chat", "values_over", "response"),
    ("deepspeed-chat", "advantage_whitening", Whitening()),
    ("openrlhf", "kl_clamp", KLClamp()),
    ("openrlhf", "advantage_whitening", Whitening(unbiased=True, floor=True)),
    ("verl", "kl_clamp", KLClamp()),
    ("verl", "advantage_whitening", Whitening()),
]


@pytest.mark.parametrize(("system", "choice", "other"), DEVIATIONS)
def test_a_single_deviation_shows_in_the_numbers(tmp_path, monkeypatch, system: str, choice: str, other):
    cases = [dict(c) for c in CASES if c.get("system") == system]
    if choice == "kl_clamp":
        # the files name this limit among the coefficients, which would put it back
        cases = [c | {"hyper": {k: v for k, v in c["hyper"].items() if k != "kl_clamp"}} for c in cases]
    monkeypatch.setitem(vectors.PRESETS, system, replace(PRESETS[system], **{choice: other}))
    (result,) = check([_write(tmp_path, cases)])
    assert not result.passed
    assert "FAILED" in result.fault


@pytest.mark.parametrize("quantity", ["token_rewards", "advantages", "returns", "policy_loss", "value_loss"])
def test_a_wrong_number_fails_and_is_named(tmp_path, capsys, quantity: str):
    case = json.loads(json.dumps(next(c for c in CASES if c.get("system") == "verl")))
    expected = case["expected"][quantity]
    while isinstance(expected, list) and isinstance(expected[0], list):
        expected = expected[0]
    if isinstance(expected, list):
        expected[0] += 1e-4
    else:
        case["expected"][quantity] += 1e-4
    assert main(["vectors", _write(tmp_path, [case])]) == 1
    assert quantity in capsys.readouterr().out


def test_not_a_number_fails(tmp_path):
    case = json.loads(json.dumps(next(c for c in CASES if c.get("system") == "verl")))
    case["expected"]["policy_loss"] = float("nan")
    assert not check([_write(tmp_path, [case])])[0].passed


def test_an_unknown_system_or_no_case_fails(tmp_path, capsys):
    case = dict(next(c for c in CASES if "system" in c)) | {"system": "nobody"}
    assert main(["vectors", _write(tmp_path, [case])]) == 1
    assert "unknown system" in capsys.readouterr().out
    assert main(["vectors", _write(tmp_path, [])]) == 1
    assert "no case" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "JSON"),
        ("[3]", "case 1"),
        ('[{"what": 1}]', "neither"),
        ('[{"loss": "hinge"}]', "hinge"),
        ('[{"system": "verl", "hyper": {}}]', "inputs"),
        ('[{"system": "verl", "hyper": {"klcoef": 1}, "inputs": {}}]', "klcoef"),
    ],
)
def test_a_malformed_file_is_named(tmp_path, capsys, text: str, said: str):
    file = tmp_path / "cases.json"
    file.write_text(text)
    assert main(["vectors", str(file)]) == 2
    assert said in capsys.readouterr().err


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        check([tmp_path / "none.json"])


#: ziegler19's rows have no padding
PADDED = [name for name, c in PRESETS.items() if c.kl_over != "row"]


@pytest.mark.parametrize("name", PADDED)
def test_what_stands_at_padding_is_heard_by_no_one_but_those_who_say_so(name: str):
    """Numbers beyond the one position after the end change nothing; at that position, only in systems that use it."""
    c = PRESETS[name]
    torch.manual_seed(0)
    mask = torch.arange(8) < torch.tensor([3, 8, 5])[:, None]
    logprobs, ref, values = torch.randn(3, 3, 8, dtype=torch.float64)
    scores = torch.randn(3, dtype=torch.float64)
    hyper = replace(c.hyper, whiten_rewards=True)

    def credit(beyond: torch.Tensor):
        noisy = [torch.where(beyond, 50.0, x) for x in (logprobs, ref / 2, values)]
        made = assign_credit(c, hyper, scores, *noisy, mask)
        return made.advantages[mask], made.returns[mask]

    inside = conventions.span(mask, "one_after")
    base = credit(torch.zeros_like(mask))
    for mine, theirs in zip(credit(~inside), base, strict=True):
        assert torch.allclose(mine, theirs)
    after = credit(inside & ~mask)
    uses_it = c.values_over != "response" or c.kl_over != "response"
    assert uses_it != all(torch.allclose(a, b) for a, b in zip(after, base, strict=True))


def test_limits_that_the_recorded_numbers_do_not_reach():
    """The clamp of the log-ratio shows only without dual clip, at a negative advantage; verl's KL clamp only in k3."""
    new, old, worse = torch.tensor([25.0]), torch.tensor([0.0]), torch.tensor([-2.0])
    assert ops.policy_loss(new, old, worse, ratio_clamp=20.0) == 2 * torch.exp(torch.tensor(20.0))
    assert ops.policy_loss(new, old, worse, ratio_clamp=20.0, dual_clip=3.0) == 6.0
    assert ops.policy_loss(-new, old, -worse, dual_clip=3.0) == ops.policy_loss(-new, old, -worse)
    assert ops.policy_loss(torch.tensor([0.25]), old, -worse, (0.2, 0.3)) == -2 * torch.exp(torch.tensor(0.25))
    assert ops.policy_loss(torch.tensor([0.25]), old, -worse, 0.2) == -2.4
    far = torch.tensor([-30.0])
    assert PRESETS["verl"].kl_clamp(far, old, "k3") == 10.0
    assert PRESETS["verl"].kl_clamp(far, old, "k1") == -30.0
    assert PRESETS["openrlhf"].kl_clamp(far, old, "k1") == -10.0
    assert PRESETS["plaudit"].kl_clamp(far, old, "k1") == -30.0


def test_presets_are_frozen_bundles_with_their_own_names():
    assert all(name == c.name for name, c in PRESETS.items())
    assert {f.name for f in fields(Conventions)} >= {"score_position", "kl_over", "advantage_whitening"}
    with pytest.raises(AttributeError):
        PRESETS["plaudit"].name = "other"
    assert PRESETS["plaudit"] == Conventions()
    assert Hyper().kl_estimator == "k1"
