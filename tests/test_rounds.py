"""Round after round: each round's data and models apart, the answers from the newest policy, the labels added up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import plaudit
from plaudit.config import CollectConfig, QuickstartConfig
from plaudit.errors import ConfigError, DataError
from plaudit.inspection.follow import watched
from plaudit.models.load import weights_digest
from plaudit.preferences.store import PreferenceStore
from plaudit.runs import read_json
from plaudit.schema import build
from plaudit.types import Preference

VOWELS = "plaudit.rewards.function:vowels"


def config(out: Path, **keys: Any) -> QuickstartConfig:
    sampling = {"max_new_tokens": 6}
    data = {
        "out": str(out),
        "model": "tiny",
        "sft": {"rows": 16, "max_length": 16},
        "collect": {"count": 4, "k": 2, "prompts": "tiny/prompts", "comparisons": "", "sampling": sampling},
        "reward": {"batch_answers": 4, "train_blocks": 1},
        "ppo": {"iterations": 2, "batch_size": 4, "prompts": "tiny/prompts", "sampling": sampling, "monitors": []}
        | {"arrangement": {"blocks": 1}},
        "evaluate": {"count": 8, "prompts": "tiny/prompts", "judges": [VOWELS]},
    }
    return build(QuickstartConfig, data | keys)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("rounds") / "run"
    with pytest.MonkeyPatch.context() as patch:
        # the oracle reads two thousand reviews first; what is tested here is the loop
        patch.setattr("plaudit.evaluation.judges.oracle_judge", lambda: lambda texts: [float(len(t)) for t in texts])
        plaudit.quickstart(config(out, rounds=3))
    return out


def said(store: Path) -> list[Preference]:
    opened = PreferenceStore(str(store))
    found = opened.preferences()
    opened.close()
    return found


def test_every_round_adds_its_labels_to_a_store_of_its_own(run):
    stores = [said(run / f"round-{n}" / "preferences.sqlite") for n in (1, 2, 3)]
    assert [len(s) for s in stores] == [4, 8, 12]
    for earlier, later in zip(stores, stores[1:], strict=False):
        assert later[: len(earlier)] == earlier
    prompts = [p.comparison.prompt for p in stores[2]]
    assert len(set(prompts)) == 12


def test_later_answers_come_from_the_policy_of_the_round_before(run):
    for number in (1, 2, 3):
        model = run / ("sft" if number == 1 else f"round-{number - 1}/ppo") / "model"
        new = said(run / f"round-{number}" / "preferences.sqlite")[-4:]
        assert {p.comparison.provenance["model"] for p in new} == {str(model)}
        assert {p.comparison.provenance["weights"] for p in new} == {weights_digest(str(model))}


def test_every_round_starts_from_the_sft_model_and_the_last_ones_policy_is_the_result(run):
    for number in (1, 2, 3):
        place = run / f"round-{number}"
        assert read_json(place / "ppo/config.json")["model"] == str(run / "sft/model")
        assert read_json(place / "ppo/config.json")["reward"] == str(place / "reward/model")
    assert weights_digest(str(run / "model")) == weights_digest(str(run / "round-3/ppo/model"))
    assert weights_digest(str(run / "round-2/ppo/model")) != weights_digest(str(run / "round-3/ppo/model"))


def test_the_report_tells_the_last_round_and_counts_them_all(run):
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "Round after round" in page and str(run / "round-3") in page
    assert [r["labels"] for r in read_json(run / "summary.json")["rounds"]] == [4, 4, 4]
    assert watched(run).folder == run / "round-3/ppo"


def test_one_round_has_no_folders_of_rounds(tmp_path, monkeypatch):
    monkeypatch.setattr("plaudit.evaluation.judges.oracle_judge", lambda: lambda texts: [float(len(t)) for t in texts])
    out = tmp_path / "run"
    plaudit.quickstart(config(out))
    assert (out / "ppo/model").is_dir() and not list(out.glob("round-*"))
    assert "Round after round" not in (out / "report.html").read_text(encoding="utf-8")


def test_prompts_that_are_all_left_out_are_a_mistake_that_is_named(cache, tmp_path):
    keys = {"model": "tiny", "prompts": "tiny/prompts", "skip": 1000, "out": str(tmp_path / "run")}
    with pytest.raises(DataError, match="lower skip"):
        plaudit.collect(build(CollectConfig, keys | {"store": str(tmp_path / "s.sqlite")}))


@pytest.mark.parametrize(
    "there, rounds, ways", [(11, 3, "use rounds=2 or collect.count=3"), (3, 2, "rounds=1 or"), (1, 2, "use rounds=1$")]
)
def test_rounds_that_need_more_prompts_than_there_are_do_not_begin(cache, tmp_path, there, rounds, ways):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"p{i}"}) + "\n" for i in range(there)))
    few = config(tmp_path / "run", rounds=rounds)
    few = few.model_copy(update={"collect": few.collect.model_copy(update={"prompts": str(prompts)})})
    with pytest.raises(DataError, match=ways) as refused:
        plaudit.quickstart(few)
    assert f"holds {there} prompts" in str(refused.value)
    assert not (tmp_path / "run").exists()


def test_what_the_rounds_set_themselves_is_refused():
    with pytest.raises(ConfigError, match=r"collect\.skip"):
        build(QuickstartConfig, {"collect": {"skip": 3}})
