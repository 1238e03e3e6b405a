"""The named conventions give the numbers that the systems' own code gave, and every choice in them is felt."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from plaudit import ops, vectors
from plaudit.cli import main
from plaudit.config import OptimizerConfig, PPOConfig, QuickstartConfig
from plaudit.conventions import PRESETS, Conventions, Hyper, KLClamp, Positions, Whitening, assign_credit, estimated_kl
from plaudit.errors import ConfigError, DataError
from plaudit.schema import build, dump, read
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
    ("ziegler19", "reward_whitening", Whitening(over="row", unbiased=True, keep_mean=True)),
    ("ziegler19", "advantage_whitening", Whitening(over="row", unbiased=True)),
    ("ziegler19", "whiten_advantages", False),
    ("trl-0.7", "score_position", "after_end"),
    ("trl-0.7", "reward_whitening", Whitening(unbiased=True, keep_mean=True)),
    ("trl-0.7", "reward_whitening", Whitening(keep_mean=True, reset=False)),
    ("trl-0.7", "advantage_whitening", Whitening()),
    ("trl-0.7", "skip_above_mean_ratio", 0.0),
    ("trl-0.7", "values_over", "one_after"),
    ("trl-1", "score_position", "last"),
    ("trl-1", "score_position", "row_end"),
    ("trl-1", "values_over", "response"),
    ("trl-1", "value_loss_over", "response"),
    ("trl-1", "reward_whitening", Whitening(unbiased=True, keep_mean=True)),
    ("deepspeed-chat", "score_position", "last"),
    ("deepspeed-chat", "kl_over", "response"),
    ("deepspeed-chat", "values_over", "response"),
    ("deepspeed-chat", "whiten_advantages", True),
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
    changed = PRESETS[system].conventions.model_copy(update={choice: other})
    monkeypatch.setitem(vectors.PRESETS, system, replace(PRESETS[system], conventions=changed))
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
        ('[{"system": "verl", "hyper": [], "inputs": {}}]', "form"),
        ("[" * 100000, "JSON"),
        ('[{"system": "verl", "hyper": {}}]', "inputs"),
        ('[{"system": "verl", "hyper": {"klcoef": 1}, "inputs": {}}]', "klcoef"),
    ],
)
def test_a_malformed_file_is_named(tmp_path, capsys, text: str, said: str):
    file = tmp_path / "cases.json"
    file.write_text(text)
    assert main(["vectors", str(file)]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("system", [["a"], {"a": 1}])
def test_a_system_that_is_no_name_fails(tmp_path, system):
    assert main(["vectors", _write(tmp_path, [{"system": system}])]) == 1


def test_a_case_that_compares_nothing_fails(tmp_path):
    case = dict(next(c for c in CASES if c.get("system") == "verl")) | {"expected": {}}
    assert "nothing was compared" in check([_write(tmp_path, [case])])[0].fault


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        check([tmp_path / "none.json"])


#: ziegler19's rows have no padding
PADDED = [name for name, p in PRESETS.items() if p.conventions.kl_over != "row"]


@pytest.mark.parametrize("name", PADDED)
def test_what_stands_at_padding_is_heard_by_no_one_but_those_who_say_so(name: str):
    """Numbers beyond the one position after the end change nothing; at that position, only in systems that use it."""
    c = PRESETS[name].conventions
    torch.manual_seed(0)
    mask = torch.arange(8) < torch.tensor([3, 8, 5])[:, None]
    logprobs, ref, values = torch.randn(3, 3, 8, dtype=torch.float64)
    scores = torch.randn(3, dtype=torch.float64)
    hyper = replace(PRESETS[name].hyper, whiten_rewards=True)
    rows = Positions.whole(mask)

    def credit(beyond: torch.Tensor):
        noisy = [torch.where(beyond, 50.0, x) for x in (logprobs, ref / 2, values)]
        made = assign_credit(c, hyper, scores, *noisy, rows)
        return made.advantages[mask], made.returns[mask]

    inside = rows.span("one_after")
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
    assert estimated_kl(PRESETS["verl"].conventions.kl_clamp, far[None], old[None], "k3") == 10.0
    assert estimated_kl(PRESETS["verl"].conventions.kl_clamp, far[None], old[None], "k1") == -30.0
    assert estimated_kl(PRESETS["openrlhf"].conventions.kl_clamp, far[None], old[None], "k1") == -10.0
    assert estimated_kl(PRESETS["plaudit"].conventions.kl_clamp, far[None], old[None], "k1") == -30.0


def test_presets_are_frozen_bundles_with_their_own_names():
    assert all(name == p.conventions.preset for name, p in PRESETS.items())
    with pytest.raises(ValueError, match="frozen"):
        PRESETS["plaudit"].conventions.preset = "verl"
    assert PRESETS["plaudit"].conventions == Conventions()


# --- presets in a run's configuration ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_sets_the_defaults_of_a_run(name: str):
    config = read(PPOConfig, None, [f"conventions.preset={name}"])
    preset = PRESETS[name]
    assert config.conventions == preset.conventions
    hyper = config.hyper()
    clip = (preset.hyper.clip,) * 2
    kl_coef = config.kl.coef if name == "plaudit" else preset.hyper.kl_coef
    assert hyper == replace(preset.hyper, clip=clip, kl_coef=kl_coef)


def test_what_the_table_says_of_optimizers_and_schedules():
    def actor(name: str) -> OptimizerConfig:
        config = read(PPOConfig, None, [f"conventions.preset={name}"])
        assert config.critic.betas == config.actor.betas
        return config.actor

    assert actor("ziegler19").eps == 1e-5 and not actor("ziegler19").eps_corrected
    assert [actor(n).max_grad_norm for n in ("ziegler19", "trl-0.7", "trl-1")] == [0, 0, 0]
    assert [actor(n).max_grad_norm for n in ("plaudit", "deepspeed-chat", "openrlhf", "verl")] == [1, 1, 1, 1]
    assert actor("deepspeed-chat").betas == actor("openrlhf").betas == (0.9, 0.95)
    schedules = [actor(n).schedule for n in PRESETS]
    assert schedules == ["linear", "linear", "constant", "linear", "cosine", "cosine", "constant"]
    assert actor("trl-1").schedule_per == "rollout" and actor("deepspeed-chat").warmup_steps == 100
    assert actor("openrlhf").final_fraction == 0.1 and actor("openrlhf").warmup_fraction == 0.03
    assert actor("verl").skip_nonfinite


def test_the_users_keys_win_over_the_presets():
    config = read(PPOConfig, None, ["conventions.preset=trl-1", "kl.coef=0.3", "conventions.score_position=last"])
    assert config.kl.coef == 0.3 and config.conventions.score_position == "last"
    assert config.conventions.value_loss_over == "one_after" and config.vf_coef == 0.1
    again = build(PPOConfig, dump(config))
    assert again == config


def test_a_preset_reaches_the_quickstarts_run_and_leaves_its_own_keys():
    config = read(QuickstartConfig, None, ["ppo.conventions.preset=verl"])
    assert config.ppo.dual_clip == 3.0 and config.ppo.kl.place == "loss"
    assert config.ppo.monitors == ["gold", "vader"] and config.ppo.arrangement.precision == "auto"


def test_a_preset_named_in_python_is_the_preset():
    made = PPOConfig(conventions=Conventions(preset="trl-1"), gamma=0.9)
    from_file = read(PPOConfig, None, ["conventions.preset=trl-1", "gamma=0.9"])
    assert made == from_file
    assert Conventions(preset="trl-1") == PRESETS["trl-1"].conventions


def test_a_systems_preset_charges_nothing_that_is_plaudits_own():
    for name in set(PRESETS) - {"plaudit"}:
        config = read(PPOConfig, None, [f"conventions.preset={name}"])
        assert config.truncation_penalty == 0 and config.length_penalty == 0


def test_an_unknown_preset_or_choice_is_refused_by_name():
    with pytest.raises(ConfigError, match="conventions.preset"):
        read(PPOConfig, None, ["conventions.preset=trl"])
    with pytest.raises(ConfigError, match="score_position"):
        read(PPOConfig, None, ["conventions.score_positon=last"])


def test_rows_in_a_run_have_no_position_beyond_the_length_limit():
    """Two tokens of prompt, a limit of 3: a full answer has no position after it, a shorter one has."""
    mask = torch.tensor([[0, 0, 1, 1, 1, 0], [0, 0, 1, 1, 0, 0]], dtype=torch.bool)
    fed = torch.arange(6)[None] < torch.tensor([[5], [5]])
    rows = Positions(mask, fed)
    assert rows.span("one_after").int().tolist() == [[0, 0, 1, 1, 1, 0], [0, 0, 1, 1, 1, 0]]
    assert rows.paid_at("after_end").nonzero().tolist() == [[0, 4], [1, 4]]
    assert rows.span("row").sum(1).tolist() == [3, 3]


@pytest.mark.parametrize("position", ["last", "after_end", "row_end"])
def test_a_score_reaches_the_answer_wherever_it_is_paid(position: str):
    """A single deviation in where the score lands moves it; it may not lose it."""
    mask = torch.tensor([[1, 1, 1, 0, 0]], dtype=torch.bool)
    nothing = torch.zeros(1, 5)
    c = Conventions(score_position=position, whiten_advantages=False)
    hyper = Hyper(gamma=1.0, lam=1.0)
    made = assign_credit(c, hyper, torch.tensor([2.0]), nothing, nothing, nothing, Positions.whole(mask))
    assert made.advantages[mask].tolist() == [2, 2, 2]


# --- explain ----------------------------------------------------------------------------------------------------------


def test_explain_names_every_choice_its_words_and_who_does_otherwise(capsys):
    assert main(["explain", "conventions.score_position=after_end"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("conventions: plaudit, but for conventions.score_position")
    assert "paid one position after the answer" in said
    assert "ziegler19: paid at the last position of the row" in said
    for key in Conventions.model_fields:
        assert key == "preset" or f"conventions.{key}" in said


@pytest.mark.parametrize("name", PRESETS)
def test_explain_has_words_for_every_preset(name: str, capsys):
    assert main(["explain", f"conventions.preset={name}"]) == 0
    said = capsys.readouterr().out
    assert f"conventions: {name}\n" in said and "not tested" not in said


def test_explain_says_nothing_of_others_where_their_presets_are_silent(capsys):
    changed = ("sampling.temperature=0.5", "actor.learning_rate=0.1", "clip_range=0.3", "lam=0.5")
    assert main(["explain", *changed]) == 0
    said = capsys.readouterr().out
    assert "      plaudit: at temperature 0.8\n" in said and "      plaudit: peak rate 0.0004\n" in said
    # what a preset sets is said, also where it is what Plaudit has
    everyone = ", ".join(PRESETS)
    assert f"      {everyone}: ratio limited to 1 ± 0.2\n" in said


def test_explain_says_which_mixtures_are_untested(capsys):
    main(["explain", "conventions.preset=verl", "conventions.score_position=after_end"])
    assert "not tested" in capsys.readouterr().out


def test_explain_leaves_out_what_has_no_effect_and_says_why(capsys):
    main(["explain", "estimator=rloo", "samples_per_prompt=2", "functions.policy_loss=mine.py:mine"])
    said = capsys.readouterr().out
    shown, _, without = said.partition("Without effect here")
    assert "Optimizer of the critic" not in shown and "λ" not in shown and "clip_range" not in shown
    assert "estimator=rloo has no critic: " in without and "critic.*" in without
    assert "by your own function" in shown and "mine.py:mine" in shown


@pytest.mark.parametrize(
    "harm",
    [
        lambda case: case["inputs"]["values"].pop(),
        lambda case: case["inputs"]["new_logprobs"].__setitem__(slice(None), case["inputs"]["new_logprobs"][:1]),
        lambda case: case["inputs"]["scores"].append(0.0),
        lambda case: case["response_lengths"].pop(),
        lambda case: case["response_lengths"].__setitem__(0, -1),
        lambda case: case["response_lengths"].__setitem__(0, 999),
        lambda case: case["response_lengths"].__setitem__(0, 1.5),
    ],
)
def test_a_recorded_step_of_wrong_lengths_is_named_not_broadcast(tmp_path, capsys, harm):
    case = next(c for c in json.loads(RECORDED.read_text()) if "system" in c)
    harm(case)
    assert main(["vectors", _write(tmp_path, [case])]) == 2
    said = capsys.readouterr().err
    assert "inputs." in said or "response_lengths" in said


def test_the_largest_error_stays_not_a_number(tmp_path, capsys):
    cases = [c for c in json.loads(RECORDED.read_text()) if c.get("system") == "verl"][:2]
    cases[0]["inputs"]["new_values"][0][0] = float("nan")
    assert main(["vectors", _write(tmp_path, cases)]) == 1
    assert "largest error nan" in capsys.readouterr().out
